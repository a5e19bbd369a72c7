"""The launcher with small workers: how a run ends, which rank is shown first, what is left behind."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shardlight.framework import report
from shardlight.framework.launch import Sweeper, run_workers, worker_env

PRELUDE = """
import os, signal, subprocess, sys, threading, time
from shardlight.framework.report import mark_done, write_report
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class CollectiveError(RuntimeError): pass
def fail(error):
    try: raise error
    except BaseException as caught: write_report(caught)
    sys.stdout.flush(); os._exit(1)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a worker's source on some ranks; gives the exit code, what was shown, and how long it took."""

    def run(source: str, world_size: int = 2, **options) -> tuple[int, str, float]:
        path = tmp_path / "worker.py"
        path.write_text(PRELUDE + source)
        err, start = io.StringIO(), time.monotonic()
        options = {"settle_s": 0.5, "grace_s": 1.0, "log_dir": tmp_path / "logs"} | options
        code = run_workers([sys.executable, str(path)], world_size, err=err, **options)
        return code, err.getvalue(), time.monotonic() - start

    return run


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_workers_get_torchruns_variables_and_end_with_zero(run, tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
    source = f"import json\nPath = {str(tmp_path)!r}\njson.dump({{n: os.environ[n] for n in {names}}}, open(f'{{Path}}/env{{rank}}', 'w'))\nopen(os.environ['SHARDLIGHT_STORE'], 'w').write('x')\n"  # fmt: skip
    assert run(source, 3)[:2] == (0, "")
    for rank in range(3):
        assert json.loads((tmp_path / f"env{rank}").read_text()) == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "shardlight",
        }  # fmt: skip


def test_cores_are_shared_unless_the_user_said_otherwise(tmp_path):
    cores = len(os.sched_getaffinity(0))
    assert worker_env(0, 1, tmp_path, {})["OMP_NUM_THREADS"] == str(cores)
    assert worker_env(0, 4 * cores, tmp_path, {})["OMP_NUM_THREADS"] == "1"
    assert worker_env(0, 2, tmp_path, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_variables_of_another_launcher_are_not_passed_on(tmp_path):
    given = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "5", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    made = worker_env(1, 2, tmp_path, given)
    assert "SLURM_JOB_ID" in made and not {"SLURM_NTASKS", "SLURM_PROCID", "TORCHELASTIC_USE_AGENT_STORE"} & made.keys()


def test_rank_zero_has_the_terminal_and_the_others_a_log(run, tmp_path, capfd):
    assert run("print('from', rank)\nprint('err', rank, file=sys.stderr)", 2)[0] == 0
    assert capfd.readouterr().out == "from 0\n"
    assert sorted((tmp_path / "logs" / "rank1.log").read_text().splitlines()) == ["err 1", "from 1"]
    assert not (tmp_path / "logs" / "rank0.log").exists()


def test_a_raise_ends_all_and_is_shown_first(run):
    code, err, wall_s = run("if rank == 1: fail(ValueError('boom'))\ntime.sleep(60)", 3)
    assert (code, wall_s < 10) == (1, True)
    lines = err.splitlines()
    assert lines[:2] == ["shardlight: rank 1 of 3 failed: ValueError: boom", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: boom"


def test_an_earlier_consequence_does_not_hide_the_cause(run):
    source = """
if rank == 0: fail(CollectiveError("rank 1 did not arrive"))
if rank == 2: fail(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:26"))
time.sleep(0.8)
fail(ValueError("boom"))
"""
    code, err, _ = run(source, 3)
    lines = err.splitlines()
    assert code == 1 and lines[0] == "shardlight: rank 1 of 3 failed: ValueError: boom"
    assert lines[-2:] == [
        "rank 0 then ended with CollectiveError: rank 1 did not arrive",
        "rank 2 then ended with RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:26",
    ]


def test_consequences_alone_still_end_the_run(run):
    code, err, wall_s = run(
        "if rank == 0: fail(CollectiveError('rank 1 did not arrive'))\ntime.sleep(60)", settle_s=0.1
    )
    assert code == 1 and wall_s < 10
    assert err.startswith("shardlight: rank 0 of 2 failed: CollectiveError: rank 1 did not arrive\nTraceback")


def test_the_same_error_everywhere_is_shown_once(run):
    _, err, _ = run("fail(ValueError('boom'))")
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1].endswith("then ended with the same error")


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("os._exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by signal 11 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", 128 + signal.SIGRTMIN + 3, "(unknown)"),
    ],
)
def test_a_rank_that_exits_or_is_killed_is_named_with_the_end_of_its_log(run, tmp_path, how, code, text):
    source = f"if rank == 1:\n    print(*range(40), sep='\\n', flush=True)\n    {how}\ntime.sleep(60)"
    got, err, wall_s = run(source)
    lines = err.splitlines()
    assert (got, wall_s < 10) == (code, True)
    assert lines[0].startswith("shardlight: rank 1 of 2 failed: ") and text in lines[0]
    assert lines[1:] == [f"The end of its output ({tmp_path}/logs/rank1.log):", *map(str, range(20, 40))]


def test_a_killed_rank_zero_is_named(run):
    assert run("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")[:2] == (
        137,
        "shardlight: rank 0 of 2 failed: killed by signal 9 (SIGKILL), which is what the system does when memory runs out (see "
        "dmesg)\n",
    )


def test_a_system_exit_is_reported_with_its_code(run):
    code, err, _ = run("if rank == 1: fail(SystemExit(7))\ntime.sleep(60)")
    assert code == 7 and err.startswith("shardlight: rank 1 of 2 failed: exit code 7\nTraceback")


def test_a_worker_that_reports_but_hangs_is_ended(run):
    source = """
try: raise ValueError("boom")
except ValueError as e:
    if rank == 1: write_report(e)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    code, err, wall_s = run(source)
    assert code == 1 and wall_s < 10 and "rank 1 of 2 failed: ValueError: boom" in err


def test_leaving_early_with_zero_is_a_failure_where_an_end_is_expected(run):
    source = "if rank == 1: sys.exit(0)\ntime.sleep(1)\nmark_done()"
    assert run(source)[0] == 0
    code, err, _ = run(source, expect_done=True)
    assert (code, err) == (1, "shardlight: rank 1 of 2 failed: exit code 0 before the end of the run\n")
    assert run("mark_done()", expect_done=True)[0] == 0


def test_our_own_errors_are_shown_without_a_traceback(run):
    _, err, _ = run("if rank == 0: fail(CollectiveError('one\\ntwo'))", terse=("CollectiveError",), settle_s=0.1)
    assert err == "shardlight: rank 0 of 2 failed: CollectiveError: one\ntwo\n"


def test_children_of_workers_end_too(run, tmp_path):
    source = f"""
ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", ignore])
open(f"{tmp_path}/child{{rank}}", "w").write(str(child.pid))
if rank == 1:
    while not os.path.exists("{tmp_path}/child0"): time.sleep(0.01)
    HOW
time.sleep(60 if rank == 0 else 0)
"""
    for how in ("os._exit(3)", "fail(ValueError())"):
        assert run(source.replace("HOW", how))[0] == (3 if "exit" in how else 1)
        assert all(gone(int((tmp_path / f"child{rank}").read_text())) for rank in range(2))
    assert run(source.replace("HOW", "").replace("60 if", "0 if"))[0] == 0
    assert all(gone(int((tmp_path / f"child{rank}").read_text())) for rank in range(2))


def test_the_private_folder_is_removed(run, temporary_folder):
    before = set(temporary_folder.iterdir())
    run("open(os.environ['SHARDLIGHT_STORE'], 'w').write('x')\nfail(ValueError()) if rank else time.sleep(60)")
    assert set(temporary_folder.iterdir()) == before


def test_a_command_that_cannot_start_leaves_nothing(tmp_path, temporary_folder):
    before = set(temporary_folder.iterdir())
    assert run_workers([str(tmp_path / "nothing")], 2, err=io.StringIO(), settle_s=0.1) != 0
    assert set(temporary_folder.iterdir()) == before


SUPERVISOR = """
import sys
from shardlight.framework.launch import run_workers
sys.exit(run_workers([sys.executable, sys.argv[1]], 2, stop_s=STOP, grace_s=0.5))
"""


@pytest.fixture
def supervisor(tmp_path):
    """Starts a supervisor process whose workers write their ids, and returns it with those."""
    started = []

    def start(source: str, stop_s: float = 10.0, **options) -> tuple[subprocess.Popen, list[int]]:
        (tmp_path / "worker.py").write_text(
            PRELUDE + source.replace("READY", f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))")
        )
        (tmp_path / "supervisor.py").write_text(SUPERVISOR.replace("STOP", str(stop_s)))
        command = [sys.executable, str(tmp_path / "supervisor.py"), str(tmp_path / "worker.py")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        started.append(process)
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        deadline = time.monotonic() + 20
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        return process, [int(file.read_text()) for file in files]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_forwarded_and_the_exit_code_says_so(supervisor, number):
    process, pids = supervisor("signal.signal(NUMBER, lambda *_: os._exit(5))\nREADY\ntime.sleep(60)".replace("NUMBER", str(int(number))))  # fmt: skip
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (128 + number, f"shardlight: ended by {number.name}.\n")
    assert all(map(gone, pids))


def test_workers_that_end_well_after_a_signal_are_a_success(supervisor):
    process, _ = supervisor("signal.signal(15, lambda *_: os._exit(0))\nREADY\ntime.sleep(60)")
    process.terminate()
    assert process.communicate(timeout=10) == ("", "") and process.returncode == 0


def test_a_signal_is_enforced(supervisor):
    process, pids = supervisor("signal.signal(15, signal.SIG_IGN)\nREADY\ntime.sleep(60)", stop_s=0.5)
    start = time.monotonic()
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 143 and time.monotonic() - start < 5 and all(map(gone, pids))


def test_a_second_signal_ends_all_at_once(supervisor):
    process, pids = supervisor("signal.signal(2, signal.SIG_IGN)\nREADY\ntime.sleep(60)", stop_s=60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130 and all(map(gone, pids))


def test_workers_and_their_children_and_files_go_with_a_killed_supervisor(supervisor, tmp_path, temporary_folder):
    before = set(temporary_folder.iterdir())
    child = f"open(f'{tmp_path}/child{{rank}}', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    process, pids = supervisor(f"{child}\nREADY\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)")
    assert set(temporary_folder.iterdir()) != before
    process.kill()
    process.wait(timeout=10)
    assert all(map(gone, pids)) and all(gone(int((tmp_path / f"child{rank}").read_text())) for rank in range(2))
    deadline = time.monotonic() + 5
    while set(temporary_folder.iterdir()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(temporary_folder.iterdir()) == before


def test_an_ignored_signal_stays_ignored(supervisor):
    process, _ = supervisor("READY\ntime.sleep(1.5)", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=10)
    assert process.returncode == 0


def test_workers_can_be_run_from_another_thread(run):
    results = []
    thread = threading.Thread(target=lambda: results.append(run("pass", 1)[:2]))
    thread.start()
    thread.join(20)
    assert results == [(0, "")]


def test_reports_tell_causes_from_consequences():
    def consequence(error: BaseException) -> bool:
        return report.report_of(error, 0).consequence

    def chained(inner: BaseException, outer: BaseException, *, hide: bool = False) -> BaseException:
        try:
            try:
                raise inner
            except BaseException as error:
                if hide:
                    raise outer from None
                raise outer from error
        except BaseException as error:
            return error

    lost = RuntimeError("Connection reset by peer")
    assert consequence(lost) and consequence(ConnectionResetError("Connection reset by peer"))
    assert not consequence(ValueError("Connection reset by peer")) and not consequence(RuntimeError("boom"))
    assert consequence(chained(lost, ValueError("while saving")))
    assert not consequence(chained(lost, ValueError("own"), hide=True))
    loop = ValueError("loop")
    loop.__cause__ = loop
    assert not consequence(loop)


def test_a_report_is_written_once_and_only_for_a_supervisor(tmp_path, monkeypatch):
    monkeypatch.delenv(report.FOLDER, raising=False)
    assert report.write_report(ValueError("x")) is False
    report.mark_done()
    monkeypatch.setenv(report.FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    assert report.write_report(ValueError("first")) and report.write_report(ValueError("second"))
    report.mark_done()
    assert report.read_report(tmp_path, 3).headline == "ValueError: first"
    assert report.read_report(tmp_path, 1) is None
    assert sorted(item.name for item in tmp_path.iterdir()) == ["rank3.done", "rank3.json"]
    early, late = (report.Report(r, t, "E", "", "", c) for r, t, c in ((0, 1.0, True), (1, 2.0, False)))
    assert report.cause_of([early, late]) is late and report.cause_of([early]) is early


def test_the_folder_of_a_run_that_was_killed_as_a_whole_goes_at_the_next_start(tmp_path):
    folders = [tmp_path / f"shardlight-{name}" for name in ("killed", "running", "next")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "alive").touch()
    (folders[0] / "store").touch()
    (tmp_path / "shardlight-else").mkdir()
    running = Sweeper(folders[1])
    try:
        Sweeper(folders[2]).finish()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["shardlight-else", "shardlight-running"]
    finally:
        running.finish()
    assert not folders[1].exists()
