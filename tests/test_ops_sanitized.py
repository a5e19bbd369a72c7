"""Every step, sum and CRC of the CPU library under the compiler's sanitizers, and compiled for one processor each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_packaging import ROOT

CHECK = Path(__file__).with_name("ops_check.cpp")
ELSEWHERE = ("host_collectives", "disk")
SOURCES = [CHECK, *sorted(p for p in (ROOT / "ops/csrc/cpu").glob("*.cpp") if p.stem not in ELSEWHERE)]
NUMBERS = ["-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
PROCESSORS = {"plain x86-64": [], "AVX2": ["-mavx2", "-mfma"], "AVX-512": ["-march=x86-64-v4"]}
FLAGS = {"AVX2": {"avx2", "fma"}, "AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def output_of(program, *flags):
    subprocess.run(["g++", *NUMBERS, *flags, *map(str, SOURCES), "-o", str(program)], check=True, timeout=600)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stderr) == (0, ""), (run.stdout + run.stderr)[-4000:]
    assert re.fullmatch(r"[0-9a-f]{16}\n", run.stdout), run.stdout
    return run.stdout


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_steps_sums_and_crcs_are_clean(tmp_path, sanitizer):
    output_of(tmp_path / "check", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")


def test_every_processor_gives_the_same_bits(tmp_path):
    has = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split())
    found = {"as built": output_of(tmp_path / "built", "-O3")}
    for name, flags in PROCESSORS.items():
        if FLAGS.get(name, set()) <= has:
            found[name] = output_of(tmp_path / "one", "-O3", "-DFOR_EACH_PROCESSOR=", *flags)
    assert len(set(found.values())) == 1, found
    assert len(found) > 2, f"this processor can compare only {sorted(found)}"
