"""`shardlight migrate`: a DeepSpeed or accelerate config as ours, with a line of report for each of its keys.

deepspeed_keys.py, zero_keys.py and accelerate_keys.py are the tables: search a key there to see what becomes of it.
Keys that mean something together (sizes of batches, precision, optimizer, ...) are *facts* in the tables, and settled
in the file of that name. Nothing in here imports torch, and nothing is guessed: what the source leaves open is FILL_IN.
"""
