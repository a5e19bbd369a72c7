"""The disk engine under the compiler's sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest
from shardlight.ops.built import library, why_no_ring

CHECK = Path(__file__).with_name("disk_check.cpp")
SOURCE = Path(__file__).parents[1] / "ops/csrc/cpu/disk.cpp"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_reads_and_writes_are_clean(tmp_path, sanitizer):
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, str(CHECK), str(SOURCE), "-o", str(program)], check=True, timeout=300)
    has_ring = library() is not None and why_no_ring() is None
    for ring in (0, 1)[: 1 + has_ring]:
        command = [str(program), str(tmp_path / "swap"), str(ring), "2000"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", ""), (ring, run.stderr[-4000:])
