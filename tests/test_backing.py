"""Large gathered buffers: memory that is mapped in and out of one storage, the same pages for one after the other."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys

import pytest
import torch
from harness import run_ranks
from loops import check_equal, plain, sharded
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies.engine import backing, flat_weights
from shardlight.strategies.engine.backing import CHUNK_BYTES, Chunks, HeapBacking, MappedBacking, back, open_chunks

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux alone")


@linux
def test_what_is_mapped_holds_its_values_until_it_is_emptied_and_pages_serve_the_next():
    chunks = Chunks()
    sizes = [CHUNK_BYTES // 4, 3 * CHUNK_BYTES // 4 + 5, 2 * CHUNK_BYTES // 4]
    made = [back(n, torch.float32, CPU, chunks) for n in sizes]
    assert [type(b) for b in made] == [HeapBacking, MappedBacking, MappedBacking]
    assert all(b.filled and not b.tensor.any() and b.tensor.numel() == n for b, n in zip(made, sizes, strict=True))
    large, other = made[1:]
    at = large.tensor.data_ptr(), other.tensor.data_ptr()
    for number in range(3):
        large.tensor.fill_(number + 1.0)
        other.tensor.fill_(-number - 1.0)
        view = large.tensor[7:11]
        assert view.sum() == 4 * (number + 1) and other.tensor.sum() == -(number + 1.0) * sizes[2]
        for b in (large, other):
            b.empty()
            b.empty()
            assert not b.filled
        for b in (other, large):
            b.fill()
            b.fill()
        assert (large.tensor.data_ptr(), other.tensor.data_ptr()) == at, "one storage for life"
    assert os.fstat(chunks.file).st_size == (4 + 2) * CHUNK_BYTES, "no more than was filled at one time"
    other.empty()
    third = back(sizes[2], torch.float32, CPU, chunks)
    assert os.fstat(chunks.file).st_size == (4 + 2) * CHUNK_BYTES and not third.tensor.any()


def read_when_empty(pipe):
    faulthandler.disable()
    b = back(CHUNK_BYTES, torch.float32, CPU, open_chunks(CPU))
    b.empty()
    pipe.send("empty")
    pipe.send(float(b.tensor[0]))


@linux
def test_reading_an_empty_one_ends_the_process_instead_of_giving_zeros():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=read_when_empty, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == "empty"
    with pytest.raises(EOFError):
        ours.recv()
    process.join(20)
    assert process.exitcode == -signal.SIGSEGV


@linux
def test_files_and_addresses_go_with_their_buffers():
    def mapped():
        with open("/proc/self/maps") as lines:
            return sum("memfd:shardlight" in line for line in lines)

    gc.collect()
    before, files = mapped(), set(os.listdir("/proc/self/fd"))
    b = back(2 * CHUNK_BYTES, torch.float32, CPU, open_chunks(CPU))
    kept = b.tensor[:3]
    assert mapped() > before
    del b
    gc.collect()
    assert kept.tolist() == [0, 0, 0], "a view keeps the memory"
    del kept
    gc.collect()
    assert mapped() == before and set(os.listdir("/proc/self/fd")) == files


def test_where_nothing_can_be_mapped_buffers_are_on_the_heap(monkeypatch):
    def refused(*args):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    assert open_chunks(CPU) is None and open_chunks(torch.device("cuda")) is None
    assert isinstance(back(CHUNK_BYTES, torch.float32, CPU, None), HeapBacking)


@linux
def test_a_map_that_the_system_refuses_is_an_error(monkeypatch):
    b = back(2 * CHUNK_BYTES, torch.float32, CPU, Chunks())
    b.empty()
    monkeypatch.setattr(backing, "_mmap", lambda *args: None)
    with pytest.raises(MemoryError, match="bytes for gathered weights could not be mapped"):
        b.fill()


def train_mapped(rank, world_size):
    backing.MAPPED_FROM_BYTES = flat_weights.MAPPED_FROM_BYTES = 0

    def losses(model, batch, step, rank):
        return [token_loss(model, batch)]

    def batch(step, rank):
        return token_batch(100 * step + rank, 4, torch.float64)

    want = plain(TinyGPT, losses, world_size, steps=6, batch=batch)
    for plan in ("zero2", "zero3"):
        check_equal(sharded(TinyGPT, losses, plan, rank, world_size, steps=6, batch=batch), want, plan)


@linux
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_on_mapped_memory_gives_the_plain_numbers(world_size):
    run_ranks(train_mapped, world_size)
