"""A checkpoint is complete or invisible: a fault or a kill at every write, fsync and rename leaves the last good one."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from shardlight.strategies.checkpoint import disk, trainer_state
from shardlight.strategies.checkpoint.manifest import CHUNK_BYTES
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import CheckpointError
from torch import nn

CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Faults:
    """Counts calls to the system in this process, and lets one of them fail, or the process die there."""

    def __init__(self, monkeypatch, at=None, kind=None):
        self.names, self.at, self.kind = [], at, kind
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        exchange = disk._exchange
        monkeypatch.setattr(disk, "_exchange", self._wrapped("exchange", exchange))

    def _wrapped(self, name, call):
        def faulty(*args, **kwargs):
            self.names.append(name)
            if len(self.names) != self.at:
                # What the disk is asked to keep is not tested, only what the calls leave.
                return None if name == "fsync" else call(*args, **kwargs)
            if self.kind == "kill":
                os._exit(9)
            if self.kind == "torn" and name == "write":
                # Half of it reaches the disk, then the machine goes.
                call(args[0], args[1][: len(args[1]) // 2])
                os._exit(9)
            if self.kind == "short" and name == "write":
                return call(args[0], args[1][: max(1, len(args[1]) // 3)])
            raise OSError(getattr(errno, self.kind), os.strerror(getattr(errno, self.kind)))

        return faulty


def start(world, plan="zero3", width=300):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, width), nn.Linear(width, width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, PLANS[plan], dist.group.WORLD if world > 1 else None)
    engine.take_optimizer(optimizer)
    return model, optimizer, engine


def step(model, optimizer, engine, number):
    torch.manual_seed(number)
    with engine.forward():
        loss = model(torch.randn(4, 7)).square().mean()
    engine.backward(loss)
    engine.step(optimizer)


def save(model, optimizer, engine, path, number):
    content = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": [], "global_step": number}
    trainer_state.save(engine, [optimizer], content, {}, Path(path))


def complete(folder):
    """The checkpoints of a folder that are complete, by name, with their step. Left-overs have hidden names."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        if path.name[0] == ".":
            continue
        reader = CheckpointReader(path)  # raises where anything is wrong
        reader.verify()
        found[path.name] = reader.content["step"]
    return found


def faults_alone(rank, world_size, folder):
    model, optimizer, engine = start(1)
    step(model, optimizer, engine, 1)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        calls = Faults(patch)  # no fault
        for name in ("a", "b"):  # over the one that is there, and beside it
            del calls.names[:]
            for number in (1, 2):
                save(model, optimizer, engine, f"{folder}/{name}/{'a' if number == 1 else name}", number)
                if number == 1:
                    assert (Path(folder) / name / "a/rank-00000.safetensors").stat().st_size > CHUNK_BYTES
                    del calls.names[:]
            names = list(calls.names)
            assert names.count("fsync") == 4 and names.count("write") >= 3 and len(names) > 8, names
            for at, call in enumerate([*names, "none"], 1):
                for kind in (["EIO", "ENOSPC"][at % 2], "kill", *(["short", "torn"] if call == "write" else [])):
                    outcomes.append(
                        one_fault(model, optimizer, engine, Path(folder) / f"{name}-{at}-{kind}", name, at, kind)
                    )
    return outcomes


def one_fault(model, optimizer, engine, here, name, at, kind):
    """A save as `name` beside a good one, with a fault at one call; returns (exit status, whether it is there)."""
    save(model, optimizer, engine, here / "a", 1)
    child = os.fork()
    if not child:
        status = 7
        try:
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, at, kind)
                save(model, optimizer, engine, here / name, 2)
            status = 0
        except CheckpointError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1, 9), (here, status)
    after, before = complete(here), {"a": 1}
    good = {**before, name: 2}
    assert after in (before, good), (here, after)
    assert status != 0 or after == good, here
    assert status != 1 or after == good or not list(here.glob(".*.writing/manifest.json")), here
    save(model, optimizer, engine, here / name, 3)
    assert complete(here) == {**before, name: 3}, here
    assert [p for p in here.iterdir() if p.name[0] == "."] == [], "the next save takes away what was left"
    return status, after == good


def test_a_fault_at_every_call_leaves_the_last_good_checkpoint(tmp_path):
    [outcomes] = run_ranks(faults_alone, 1, folder=str(tmp_path), timeout_s=180)
    assert len(outcomes) > 60
    assert {(0, True), (1, False), (9, False), (9, True)} <= set(outcomes)


def fault_on_one_rank(rank, world_size, folder):
    model, optimizer, engine = start(world_size)
    step(model, optimizer, engine, 1)
    save(model, optimizer, engine, f"{folder}/a", 1)
    for failing in range(world_size):
        for at in (1, 2):
            message = ""
            with pytest.MonkeyPatch.context() as patch:
                Faults(patch, at if rank == failing else None, "ENOSPC")
                try:
                    save(model, optimizer, engine, f"{folder}/a", 2)
                except CheckpointError as error:
                    message = str(error)
            everyone = engine.collectives.gather_objects(message, "messages")
            assert len(set(everyone)) == 1, everyone
            assert f"rank {failing}: [Errno 28] No space left" in message and "was not written" in message
            assert complete(folder) == {"a": 1} and not list(Path(folder).glob(".*.writing/manifest.json"))
            engine.agreement.meet("looked at")
    save(model, optimizer, engine, f"{folder}/a", 2)
    assert complete(folder) == {"a": 2}
    engine.agreement.meet("complete")
    # A damaged byte that only one rank meets is everyone's error, before any weight changes.
    file = Path(folder) / "a" / "rank-00001.safetensors"
    if rank == 0:
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size - 1)
            last = opened.read(1)[0]
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([last ^ 1]))
    engine.agreement.meet("damaged")
    reader = CheckpointReader(f"{folder}/a")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged"):
        trainer_state.verify_together(engine, reader, False)


def test_a_fault_on_one_rank_is_everyone_s_and_nothing_is_left(tmp_path):
    run_ranks(fault_on_one_rank, 2, folder=str(tmp_path))


def killed_while_saving(rank, world_size, folder, at):
    model, optimizer, engine = start(world_size)
    step(model, optimizer, engine, 1)
    save(model, optimizer, engine, f"{folder}/a", 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            Faults(patch, at, "kill")
        save(model, optimizer, engine, f"{folder}/a", 2)


@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_that_is_killed_while_saving_leaves_the_last_good_checkpoint(at, tmp_path):
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(killed_while_saving, 2, folder=str(tmp_path), at=at)
    assert complete(tmp_path) == {"a": 1}


def test_what_the_exchange_of_names_cannot_do_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_exchange", lambda a, b: False)
    for number in (1, 2):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "manifest.json").write_text(str(number))
        disk.publish(tmp_path / "new", tmp_path / "target")
        assert (tmp_path / "target" / "manifest.json").read_text() == str(number)
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
