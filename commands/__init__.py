"""The groups of the `shardlight` command; like `cli.py` they import what is slow only when it is needed."""
