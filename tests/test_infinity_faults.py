"""Swap files that cannot be, fail, or are left: what is said, what ends, and what is there afterwards."""

import ctypes
import errno
import gc
import os
import resource
import signal
import socket
import struct
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from command import run_command
from harness import RanksFailedError, run_ranks
from loops import group
from shardlight.ops import built
from shardlight.ops.disk import DiskError
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from test_cli import project  # noqa: F401
from test_infinity_optimizers import MADE, Sizes, everything_on, run, same

NAME = "shardlight-swap-"


def swap_files():
    """The descriptors of this process's swap files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if NAME in os.readlink(f"/proc/self/fd/{name}"):
                found.append(name)
    return found


def start(world, folder, **options):
    model = Sizes()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    engine = Engine(model, PLANS["infinity"], group(world), offload=everything_on(folder), **options)
    engine.take_optimizer(opt)
    return model, engine, opt


def step(model, engine, opt, number, rank):
    with engine.forward():
        loss = model(number, rank)
    engine.backward(loss)
    engine.step(opt)


def bad_folders(rank, world, folder):
    folder = Path(folder)
    (folder / "file").write_text("mine")
    for bad, why in (
        (folder / "file", f"disk: {folder}/file is no folder and cannot be one: File exists"),
        (folder / "file" / "below" / "it", f"disk: {folder}/file/below/it is no folder and cannot be one: Not a dir"),
        (Path("/proc/self"), "disk: /proc/self: no file can be made there: .* cannot be created: "),
        (Path("/proc/nothing/swap"), "disk: /proc/nothing/swap is no folder and cannot be one: "),
    ):
        with pytest.raises(StrategyError, match=why):
            start(world, str(bad))
    assert (folder / "file").read_text() == "mine"


@pytest.mark.case("C079")
def test_a_folder_that_cannot_be_used_is_an_error_that_says_why(tmp_path):
    run_ranks(bad_folders, 1, folder=str(tmp_path))


def full(rank, world, folder, how):
    """Setting up takes 82 kB a copy of the weights; gradients and moments come with the first step."""
    limit = 200_000
    if how == "tmpfs":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None):
            return "needs the right to mount"  # CLONE_NEWNS; MS_REC | MS_PRIVATE
        if libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=200k"):
            return "needs the right to mount"
    model, engine, opt = start(world, folder)
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(DiskError) as error:
        step(model, engine, opt, 1, rank)
    assert error.value.errno == (errno.EFBIG if how == "limit" else errno.ENOSPC)
    text = str(error.value)
    assert text.startswith(f"{folder}/{NAME}") and "cannot reserve" in text, text
    assert ("ulimit -f" if how == "limit" else "bytes are free there: make room") in text, text
    return None


@pytest.mark.case("C079")
@pytest.mark.parametrize("how", ["limit", "tmpfs"])
def test_a_disk_that_is_full_when_the_file_grows_is_named(how, tmp_path):
    (why,) = run_ranks(full, 1, folder=str(tmp_path), how=how)
    if why:
        pytest.skip(why)


def two_jobs(rank, world, folder):
    """Two in one folder, with a leftover of a killed process and a checkpoint in it."""
    folder = Path(folder)
    left = folder / f"{NAME}{socket.gethostname()}-1-abc"
    others = folder / f"{NAME}elsewhere-1-abc"
    saved = folder / "checkpoints" / "step-1" / "rank-00000.safetensors"
    saved.parent.mkdir(parents=True)
    for path in (left, others, saved):
        path.write_text("here")
    first = start(world, str(folder))
    assert not left.exists() and others.exists(), "what is of this host was left by a process that was killed"
    second = start(world, str(folder))
    assert len(swap_files()) == 2
    for number in range(1, 5):
        for job in (first, second):
            step(*job, number, rank)
    weights = []
    for model, engine, _opt in (first, second):
        with engine.gathered():
            weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", others.name]
    assert saved.read_text() == "here"
    del first, second, job, model, engine, _opt
    gc.collect()
    assert not swap_files(), "a file goes with its engine"


@pytest.mark.case("C079")
def test_jobs_in_one_folder_do_not_see_each_other_and_leave_checkpoints_alone(tmp_path):
    run_ranks(two_jobs, 1, folder=str(tmp_path))


def cut(rank, world, folder, when):
    """The last rank's file is cut to nothing."""
    model, engine, opt = start(world, folder)

    def strike(now, *_):
        if now == when and rank == world - 1:
            (number,) = swap_files()
            os.truncate(f"/proc/self/fd/{number}", 0)

    for number in range(1, 3):
        step(model, engine, opt, number, rank)
    strike("forward")
    with engine.forward():
        loss = model(3, rank)
    # Gradients are written next, behind all else in the file.
    loss.register_hook(partial(strike, "backward"))
    engine.backward(loss)
    strike("step")
    engine.step(opt)
    with engine.gathered():
        pass


@pytest.mark.parametrize("when", ["backward", *(pytest.param(w, marks=pytest.mark.long) for w in ("forward", "step"))])
def test_a_swap_file_that_is_cut_short_ends_all_ranks_and_gives_no_old_data(when, tmp_path):
    with pytest.raises(RanksFailedError) as error:
        run_ranks(cut, 2, folder=str(tmp_path), when=when)
    cause, other = error.value.reports[1], error.value.reports[0]
    assert f"DiskError: {tmp_path}/{NAME}" in cause and "the file is 0 bytes, needs " in cause, cause
    assert "rank 1" in other and "has ended" in other, other


def no_ring(rank, world, folder):
    want = run(world, rank, MADE["Adam"], None)
    # A filter of system calls as containers have it: 425 is io_uring_setup.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in steps))
    given = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, given, 0, 0) == 0
    built.why_no_ring.cache_clear()
    assert start(world, folder)[1].tiers._engine.way == "threads"
    same(run(world, rank, MADE["Adam"], everything_on(folder)), want, "threads")


@pytest.mark.case("C079")
@pytest.mark.skipif(built.why_not() is not None, reason=f"compiled ops are not used: {built.why_not()}")
def test_without_io_uring_threads_give_the_same_numbers(tmp_path):
    run_ranks(no_ring, 1, folder=str(tmp_path))


def ended(rank, world, folder):
    """A step that fails, and an engine that is taken off its model: files and threads go."""

    def open_now():
        gc.collect()
        deadline = time.monotonic() + 2
        while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        return swap_files(), len(os.listdir("/proc/self/task"))

    model, engine, opt = start(world, folder)  # and what PyTorch makes on first use
    step(model, engine, opt, 1, rank)
    del model, engine, opt
    gc.collect()
    time.sleep(0.2)
    before = len(os.listdir("/proc/self/task"))
    for how in ("forward", "hook", "detach"):
        model, engine, opt = start(world, folder)
        step(model, engine, opt, 1, rank)
        assert len(swap_files()) == 1 and len(os.listdir("/proc/self/task")) > before
        if how == "forward":
            with suppress(ZeroDivisionError), engine.forward():
                model(2, rank) / (1 // 0)
        elif how == "hook":

            def fail(_):
                raise ZeroDivisionError

            with suppress(ZeroDivisionError):
                with engine.forward():
                    loss = model(2, rank)
                loss.register_hook(fail)
                engine.backward(loss)
            del loss
        else:
            engine.detach()
            moments = opt.state[model.weights[5]]["exp_avg"].clone()
            assert moments.abs().sum() > 0, "the optimizer is the user's still"
            opt.zero_grad()
            model(2, rank).backward()
        del model, engine, opt
        if how == "hook":
            del fail
        assert open_now() == ([], before), how


def test_files_and_threads_go_with_a_step_that_fails_and_with_an_engine_that_is_detached(tmp_path):
    run_ranks(ended, 1, folder=str(tmp_path))


@pytest.mark.case("C079")
@pytest.mark.parametrize(
    "how, code",
    [
        ("kill", 137),
        pytest.param("hang", -signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("nothing", 0, marks=pytest.mark.long),
        pytest.param("raise", 1, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_of_swap_files_however_a_run_ends(how, code, project):  # noqa: F811
    """hang: the supervisor is killed while a rank hangs."""
    options = ["strategy=infinity", f"module.how={how}", "module.rank=1", "module.step=1", "checkpoint=null"]
    signals = [(0.0, 0)] if how != "hang" else [(6.0, signal.SIGKILL)]
    done = run_command(["fit", "config.yaml", *options], project, signals=signals, timeout_s=120)
    assert done.code == code, done.output
    assert how == "nothing" or (project / "struck").exists()
    assert list((project / "swap").iterdir()) == [] and not done.left_running
