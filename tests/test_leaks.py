"""The guard of `conftest.py` really fails a test that leaves something behind: run on a small suite of offenders."""

import subprocess
import sys
from pathlib import Path

OFFENDERS = {
    "process": "import subprocess; subprocess.Popen(['sleep', '5'])",
    "group": "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
    "variable": "import os; os.environ['LEFT_HERE'] = '1'",
    "file": "open('left.txt', 'w').close()",
    "temporary": "import tempfile; tempfile.mkstemp()",
    "folder": "import os; os.chdir('/')",
    "nothing": "pass",
}


def test_each_kind_of_leak_fails_its_test(tmp_path):
    text = "".join(f"def test_{name}():\n    {line}\n" for name, line in OFFENDERS.items())
    (tmp_path / "test_offenders.py").write_text(text)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-rEp", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--basetemp", str(tmp_path / "nested"), "test_offenders.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    for name, words in [
        ("process", "the process"),
        ("group", "an initialised process group"),
        ("variable", "the variable LEFT_HERE"),
        ("file", "left.txt: write under tmp_path"),
        ("temporary", "the file"),
        ("folder", "the working directory"),
    ]:
        line = next((x for x in run.stdout.splitlines() if x.startswith("ERROR") and f"test_{name}" in x), "")
        assert line, f"{name} was not noticed:\n{run.stdout}"
        assert words in run.stdout
    assert "ERROR test_offenders.py::test_nothing" not in run.stdout, run.stdout
