"""Memory that a step frees is used again by the next."""

import subprocess
import sys

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
