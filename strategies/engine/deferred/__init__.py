"""Building a module without memory: its initialisation is recorded, and replayed unit by unit when it is sharded."""
