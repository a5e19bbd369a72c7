"""The harness itself: it returns results, and reports the cause, a death and a hang by rank."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RanksFailedError, RanksHungError, run_ranks


def _sum(rank, world_size, n):
    total_n = torch.full((n,), float(rank))
    dist.all_reduce(total_n)
    return rank, total_n.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_own_result(world_size):
    expected = [float(sum(range(world_size)))] * 3
    assert run_ranks(_sum, world_size, n=3) == [(rank, expected) for rank in range(world_size)]


def _tensor(rank, world_size):
    return torch.full((3,), float(rank))


def test_a_tensor_can_be_returned():
    assert torch.equal(torch.stack(run_ranks(_tensor, 2)), torch.tensor([[0.0] * 3, [1.0] * 3]))


def _surroundings(rank, world_size):
    names = (*harness.LAUNCH_VARIABLES, "A_TEST_VARIABLE")
    warm = [name for name in ("lightning.pytorch", "torchmetrics", "pytest") if name in sys.modules]
    return {k: os.environ.get(k) for k in names}, os.getcwd(), warm, torch.get_num_threads(), dist.is_initialized()


def test_ranks_are_warm_and_see_the_callers_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("A_TEST_VARIABLE", "yes")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.chdir(tmp_path)
    for variables, folder, warm, threads, started in run_ranks(_surroundings, 2, threads=2):
        assert variables == dict.fromkeys(harness.LAUNCH_VARIABLES) | {"A_TEST_VARIABLE": "yes"}
        assert folder == str(tmp_path)
        assert warm == ["lightning.pytorch", "torchmetrics", "pytest"]
        assert threads == 2 and started


def _collected_and_started(rank, world_size):
    gc.disable()
    return len(gc.get_objects()), multiprocessing.get_start_method()


def test_ranks_collect_what_they_made_and_start_workers_as_a_program_does():
    for objects, method in run_ranks(_collected_and_started, 1):
        assert objects < 100_000, "a collection looks at all that was imported"
        assert method == multiprocessing.get_start_method()


def test_without_init_the_launcher_variables_are_set():
    for rank, (variables, _, _, threads, started) in enumerate(run_ranks(_surroundings, 2, init=False)):
        assert not started and threads == 1
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert all(variables[name] for name in harness.LAUNCH_VARIABLES if name != "NODE_RANK")


def test_two_ranks_cost_little():
    run_ranks(_sum, 2, n=1)  # the server may still be starting
    started = time.monotonic()
    run_ranks(_sum, 2, n=1)
    assert time.monotonic() - started < 10  # 0.2 s; importing torch would be 7 s or more on a busy machine


def _raise(rank, world_size):
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_the_cause_is_reported_first():
    with pytest.raises(RanksFailedError, match="ValueError: the cause") as caught:
        run_ranks(_raise, 2)
    assert next(iter(caught.value.reports)) == 1


def _wrong(rank, world_size):
    answer = 41 + rank
    assert answer == 41


def test_a_failed_assert_shows_its_values():
    with pytest.raises(RanksFailedError, match="answer = 42"):
        run_ranks(_wrong, 2)


def _unpicklable(rank, world_size):
    return lambda: None


def test_a_result_that_cannot_travel_is_reported():
    with pytest.raises(RanksFailedError, match="pickle"):
        run_ranks(_unpicklable, 1)


def _warn(rank, world_size, message):
    warnings.warn(message, stacklevel=1)


def test_a_warning_is_an_error_unless_listed():
    with pytest.raises(RanksFailedError, match="UserWarning: look out"):
        run_ranks(_warn, 1, message="look out")
    run_ranks(_warn, 1, message="The 'train_dataloader' does not have many workers which ...")


def _die(rank, world_size, signal_number):
    if rank == 1 and signal_number:
        os.kill(os.getpid(), signal_number)
    if rank == 1:
        os._exit(3)
    time.sleep(100)


@pytest.mark.parametrize("number,words", [(0, "exit code 3"), (signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "_die")])
def test_a_death_is_reported_soon(number, words):
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=f"rank 1 of 2:\ndied without a word[^$]*{words}"):
        run_ranks(_die, 2, signal_number=number)
    assert time.monotonic() - started < 20


def _hold_the_pipe(rank, world_size):
    child = subprocess.Popen(["sleep", "100"], close_fds=False)
    assert child.pid
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_with_living_children_is_noticed_and_they_end():
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(_hold_the_pipe, 1)
    assert time.monotonic() - started < 20


def _hang(rank, world_size):
    if rank == 0:
        dist.barrier()
    time.sleep(100)


def test_a_hang_names_its_ranks_and_where_they_stand():
    with pytest.raises(RanksHungError, match=r"ranks \[0, 1\] of 2 still running after 2.0 s") as caught:
        run_ranks(_hang, 2, timeout_s=2.0)
    assert "in barrier" in caught.value.reports[0]
    assert "in _hang" in caught.value.reports[1]
