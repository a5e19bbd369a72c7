"""Contenders without a model, for the tests of the benchmark itself; what each does on rank 1 is its name."""

import os
import time
from pathlib import Path

FAILS_AT = 3  # the first step of the rounds: 0 is the start, 1 and 2 warm up
STEP_S = 0.01


class SevenCollectives:
    def start(self):
        pass

    def stop(self):
        return 7


def run(job, turns):
    """Writes who stepped when into a file per rank; its loss is the step's number."""
    rank = int(os.environ["RANK"])
    counted = dict.fromkeys(job["hosts"], 0)
    turns.counters = lambda who: {"sent_bytes": counted[who]}
    turns.gauges = lambda who: {"state_bytes": 100 + rank, "table_sent_bytes": 50}
    turns.probes["collectives"] = SevenCollectives
    with Path(os.environ["TOY_LOG"], f"{'-'.join(job['hosts'])}.{rank}").open("w") as log:
        for who, step in turns:
            began_s = time.monotonic()
            if rank == 1 and step == FAILS_AT:
                misbehave(who)
            time.sleep(STEP_S * (3 if who == "slow" else 1))
            counted[who] += 60
            turns.report(float(step))
            print(who, step, began_s, time.monotonic(), file=log, flush=True)


def misbehave(who):
    if who == "raises":
        raise ValueError("boom on purpose")
    if who == "dies":
        os.kill(os.getpid(), 9)
    if who == "leaves":
        os._exit(0)
    if who == "hangs":
        time.sleep(600)
