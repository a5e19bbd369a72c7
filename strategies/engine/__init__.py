"""The sharding engine: one mechanism for every row of the ZeRO table."""
