"""The host's collectives under the compiler's sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("host_collectives_check.cpp")
SUMS = Path(__file__).parents[1] / "ops/csrc/cpu/sum_parts.cpp"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_collectives_are_clean(tmp_path, sanitizer):
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, str(SOURCE), str(SUMS), "-o", str(program)], check=True, timeout=300)
    for world_size in (2, 3, 4):
        command = [str(program), str(world_size), "1000"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", ""), run.stderr[-4000:]
