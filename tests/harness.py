"""Runs one function on several gloo ranks and hands back what each rank returned.

Ranks are forked from a server that has already imported torch and Lightning (`warm.py`), so a two-rank test costs
0.2 to 0.7 s; a spawned rank would import them anew, 7 to 16 s on a 2-core machine. A product over many settings calls
`run_ranks` once per world size and loops inside the body.
"""

import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

GRACE_S = 1.0  # after the first failure, so that other ranks can report too
EXIT_S = 10.0  # between a rank's report and its end
STACK_S = 2.0  # for a stuck rank to write its stack
CONNECTED = "connected"  # how many ranks have their process group
# Asks for a stack. One without a name: the Trainer's teardown puts back the handlers of all named signals as it knew
# them, and it does not know of faulthandler's.
STACK_SIGNAL = signal.SIGRTMIN + 1 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1

# Everything else that warns inside a rank fails its test. Each line: why the warning is no fault of ours.
HARMLESS_WARNINGS = (
    "The '.*' does not have many workers",  # Lightning; tests load in the main process on purpose
    "The number of training batches .* is smaller than the logging interval",  # Lightning; tests are short
    "Checkpoint directory .* exists and is not empty",  # Lightning; a test that saves twice
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # torch >= 2.9, raised by Lightning's own code
    "Warning: Profiler clears events at the end of each cycle",  # torch 2.11, of every profile
)
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
LAUNCH_VARIABLES += ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "SHARDLIGHT_STORE")

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["warm"]
CONTEXT.set_forkserver_preload(PRELOADED)


class RanksFailedError(AssertionError):
    """Some ranks raised, died or hung; `reports` holds what is known, by rank, the first failure first."""

    def __init__(self, reports: dict[int, str], world_size: int, note: str = ""):
        self.reports = reports
        lines = [f"rank {rank} of {world_size}:\n{report}" for rank, report in reports.items()]
        super().__init__("\n".join([note, *lines] if note else lines))


class RanksHungError(RanksFailedError):
    """No rank failed, but some were still running at the timeout; `reports` holds their stacks."""


def run_ranks(body, world_size: int, timeout_s: float = 60.0, threads: int = 1, init: bool = True, **kwargs) -> list:
    """Calls `body(rank, world_size, **kwargs)` on every rank and returns what each returned, by rank.

    Args:
        body: a function at the top level of a test module (ranks import it by name).
        timeout_s: of the whole call.
        threads: intra-op threads of each rank.
        init: True: a gloo group is there, and no launcher variable is set. False: no group; the variables of
            torchrun and SHARDLIGHT_STORE are set, so that a `Trainer(devices=world_size)` starts the group itself.
        kwargs: picklable; the same on every rank. Ranks see the caller's environment and working directory.
    Raises:
        RanksFailedError: some rank raised or died.
        RanksHungError: some ranks were still running after `timeout_s`; holds where each of them stands.
    """
    start_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        settings = {"folder": folder, "timeout_s": timeout_s, "threads": threads, "init": init}
        settings["variables"] = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
        settings["port"] = free_port()
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = CONTEXT.Pipe(duplex=False)
                process = CONTEXT.Process(target=_rank, args=(body, rank, world_size, settings, kwargs, theirs))
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, processes, folder, timeout_s)
        finally:
            for process in processes:
                _kill(process)
            for pipe in pipes:
                pipe.close()


def preload(module: str) -> None:
    """Has the fork server import `module` too. Called at the top of a test module, before any test runs ranks."""
    if module not in PRELOADED:
        PRELOADED.append(module)
        CONTEXT.set_forkserver_preload(PRELOADED)


@functools.cache
def start_server() -> None:
    """Starts the fork server, once; ranks run with its modules already imported.

    Python 3.11's fork server ignores the parent's sys.path; without the variable the preload fails silently.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _collect(pipes: list, processes: list, folder: str, timeout_s: float) -> list:
    """Waits for every rank's word; after a failure the others have GRACE_S to add theirs."""
    world_size = len(processes)
    results, failures, pending = [None] * world_size, {}, set(range(world_size))
    deadline = time.monotonic() + timeout_s
    while pending and (left := deadline - time.monotonic()) > 0:
        # The sentinel too: a killed rank's own children may hold its pipe open.
        wait([pipes[r] for r in pending] + [processes[r].sentinel for r in pending], timeout=left)
        for rank in sorted(pending):
            word = _word(pipes[rank], processes[rank], f"{folder}/stack{rank}")
            if word is None:
                continue
            pending.remove(rank)
            results[rank], failure = word
            if failure:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        note = f"(ranks {sorted(pending)} were still running {GRACE_S} s later)" if pending else ""
        raise RanksFailedError(failures, world_size, note)
    if pending:
        stacks = {rank: _stack(processes[rank], f"{folder}/stack{rank}") for rank in sorted(pending)}
        note = f"ranks {sorted(pending)} of {world_size} still running after {timeout_s} s: "
        raise RanksHungError(stacks, world_size, note + "look for a collective that not every rank reaches")
    for rank, process in enumerate(processes):
        process.join(EXIT_S)
        if process.is_alive():
            stack = _stack(process, f"{folder}/stack{rank}")
            raise RanksFailedError({rank: f"finished its body, but did not exit\n{stack}"}, world_size)
    return results


def _word(pipe, process, stack_file: str) -> tuple[object, str] | None:
    """Returns (result, failure) when the rank has spoken or died, else None."""
    try:
        if pipe.poll():
            return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(EXIT_S)
    if process.is_alive():
        return None
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    crash = Path(stack_file).read_text() if Path(stack_file).exists() else ""
    return None, f"died without a word, {how}\n{crash}"


def _stack(process, path: str) -> str:
    """Asks a stuck rank for its Python stack (all threads, innermost call first)."""
    with suppress(ProcessLookupError):  # ended a moment ago
        os.kill(process.pid, STACK_SIGNAL)
    deadline, text = time.monotonic() + STACK_S, ""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, text = text, Path(path).read_text() if Path(path).exists() else ""
        if text and text == before:
            break
    return text or "(wrote no stack)"


def _kill(process) -> None:
    """Ends a rank and whatever it started: every rank leads a process group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def _rank(body, rank: int, world_size: int, settings: dict, kwargs: dict, pipe) -> None:
    import torch
    import torch.distributed as dist
    from shardlight.strategies.engine import partition

    partition.MIN_UNIT_NUMEL = 0  # the models of tests are tiny, and their blocks units all the same
    gc.freeze()  # [Note: inherited objects]
    # Loaders start their workers as in any program; by the fork server's way each would import torch anew.
    multiprocessing.set_start_method(None, force=True)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives a killed pytest
    stack_file = open(f"{settings['folder']}/stack{rank}", "w")  # noqa: SIM115 (open for the life of the rank)
    faulthandler.enable(file=stack_file)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    os.environ.clear()
    os.environ.update(settings["variables"])
    torch.set_num_threads(settings["threads"])
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])  # else Lightning takes all cores, for each rank alone
    torch.manual_seed(0)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    store = None
    try:
        if settings["init"]:
            limit = timedelta(seconds=settings["timeout_s"] + 30)  # later than ours, which shows the stacks
            store = dist.FileStore(f"{settings['folder']}/store", world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
            store.add(CONNECTED, 1)
        else:
            os.environ.update(_launch_variables(rank, world_size, settings))
        word = pickle.dumps((body(rank, world_size, **kwargs), ""))
    except BaseException as fault:
        word = pickle.dumps((None, _describe(fault)))
    pipe.send_bytes(word)
    if store is not None:
        # A rank that is done at once would break the connections of one that is still making them.
        deadline = time.monotonic() + GRACE_S
        while store.add(CONNECTED, 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()


def _launch_variables(rank: int, world_size: int, settings: dict) -> dict[str, str]:
    """What torchrun sets for a worker on one node, and the rendezvous file of our own launcher."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    variables |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": settings["port"]}
    variables |= {"TORCHELASTIC_RUN_ID": "test", "SHARDLIGHT_STORE": f"{settings['folder']}/store"}
    return {name: str(value) for name, value in variables.items()}


def _describe(fault: BaseException) -> str:
    """The traceback, and the values around a failed assert (pytest rewrites asserts only in its own process)."""
    text = "".join(traceback.format_exception(fault))
    frames = list(traceback.walk_tb(fault.__traceback__))
    if isinstance(fault, AssertionError) and frames:
        for name, value in frames[-1][0].f_locals.items():
            try:
                shown = repr(value)
            except Exception as unprintable:  # a value that cannot be shown must not hide the fault itself
                shown = f"<{type(unprintable).__name__} in repr>"
            text += f"    {name} = {shown[:300]}\n"
    return text
