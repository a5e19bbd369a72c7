"""Memory that a step frees is used again by the next."""

import subprocess
import sys

import torch
from harness import run_ranks
from shardlight.ops.memory import fields_of, return_freed_memory
from shardlight.strategies import deferred_init

CODE = """
import resource, sys
from shardlight.ops.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
import torch
def step():
    held = [torch.ones(2_000_000) for _ in range(12)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how, **variables):
    run = subprocess.run(
        [sys.executable, "-c", CODE, how], env={"PATH": "", **variables}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_blocks_that_come_and_go_cause_no_page_faults():
    given_back = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert faults("not kept", **given_back) > 50_000 > 5_000 > faults("kept")


def test_what_the_user_has_set_counts():
    code = "from shardlight.ops.memory import keep_freed_memory; assert not keep_freed_memory()"
    subprocess.run([sys.executable, "-c", code], env={"MALLOC_TRIM_THRESHOLD_": "1000"}, check=True, timeout=60)


def taken(work):
    before = fields_of("/proc/self/status")["RssAnon"]
    kept = work()
    return fields_of("/proc/self/status")["RssAnon"] - before, kept


def little_memory(rank, world):
    def build():
        sizes = [(512, 1536), (512, 512), (512, 2048), (2048, 512)]
        with deferred_init():
            # What is noted of each lies where the numbers that it drew have been.
            return [torch.nn.Linear(*size) for _ in range(8) for size in sizes]

    took, _ = taken(build)
    assert took < 10 << 20, "100 MB of weights that are not there"

    def holes():
        kept = []
        for n in range(40):
            block = torch.ones(600_000 + 5000 * n)
            kept.append(torch.ones(100))
            del block  # too small for the next, with what stays in it
        return kept

    assert return_freed_memory(1 << 20)
    took, _ = taken(holes)
    assert took < 20 << 20, "110 MB that were freed between blocks that stay"


def test_building_without_memory_takes_none_and_holes_are_given_back():
    run_ranks(little_memory, 1)
