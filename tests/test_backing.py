"""Large gathered buffers: pages are moved in and out of one storage, and serve one after the other."""

import gc
import signal
import subprocess
import sys

import pytest
import torch
from harness import run_ranks
from loops import check_equal, plain, sharded
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies.engine import backing, flat_weights
from shardlight.strategies.engine.backing import CHUNK_BYTES, Chunks, HeapBacking, MovedBacking, back, open_chunks

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux alone")


@linux
def test_what_is_filled_holds_its_values_until_it_is_emptied_and_pages_serve_the_next():
    chunks = Chunks()
    sizes = [CHUNK_BYTES // 4, 3 * CHUNK_BYTES // 4 + 5, 2 * CHUNK_BYTES // 4]
    made = [back(n, torch.float32, CPU, chunks) for n in sizes]
    assert [type(b) for b in made] == [HeapBacking, MovedBacking, MovedBacking]
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
    assert chunks.made == 4 + 2, "no more than was filled at one time"
    other.empty()
    third = back(sizes[2], torch.float32, CPU, chunks)
    assert chunks.made == 4 + 2 and not third.tensor.any()


READS_WHEN_EMPTY = """
import torch
from shardlight.strategies.engine.backing import CHUNK_BYTES, back, open_chunks

cpu = torch.device("cpu")
b = back(CHUNK_BYTES, torch.float32, cpu, open_chunks(cpu))
b.empty()
print("empty", flush=True)
print(float(b.tensor[0]), flush=True)
"""


@linux
def test_reading_an_empty_one_ends_the_process_instead_of_giving_zeros():
    # A process of its own from the start: one forked from here would wait for threads that were not forked with it.
    run = subprocess.run([sys.executable, "-c", READS_WHEN_EMPTY], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("empty\n", -signal.SIGSEGV), run.stderr


@linux
def test_addresses_go_with_their_buffers():
    def known(address):
        with open("/proc/self/maps") as lines:
            ranges = [[int(n, 16) for n in line.split()[0].split("-")] for line in lines]
        return any(low <= address < high for low, high in ranges)

    chunks = open_chunks(CPU)
    b = back(8 * CHUNK_BYTES, torch.float32, CPU, chunks)
    places = [b.tensor.data_ptr(), chunks.take(1)[0]]
    kept = b.tensor[:3]
    assert all(map(known, places))
    del b, chunks
    gc.collect()
    assert known(places[0]) and kept.tolist() == [0, 0, 0], "a view keeps the memory"
    del kept
    gc.collect()
    assert not any(map(known, places))


def test_where_pages_cannot_be_moved_buffers_are_on_the_heap(monkeypatch):
    assert open_chunks(torch.device("cuda")) is None
    for missing in (None, lambda *args: None):
        monkeypatch.setattr(backing, "_mremap", missing)
        assert open_chunks(CPU) is None
    assert isinstance(back(CHUNK_BYTES, torch.float32, CPU, None), HeapBacking)


@linux
def test_a_move_that_the_system_refuses_is_an_error(monkeypatch):
    b = back(2 * CHUNK_BYTES, torch.float32, CPU, Chunks())
    b.empty()
    monkeypatch.setattr(backing, "_mremap", lambda *args: None)
    with pytest.raises(MemoryError, match="bytes for gathered weights could not be moved"):
        b.fill()


def train_moved(rank, world_size):
    backing.MOVED_FROM_BYTES = flat_weights.MOVED_FROM_BYTES = 0

    def losses(model, batch, step, rank):
        return [token_loss(model, batch)]

    def batch(step, rank):
        return token_batch(100 * step + rank, 4, torch.float64)

    want = plain(TinyGPT, losses, world_size, steps=6, batch=batch)
    for plan in ("zero2", "zero3"):
        check_equal(sharded(TinyGPT, losses, plan, rank, world_size, steps=6, batch=batch), want, plan)


@linux
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_on_moved_pages_gives_the_plain_numbers(world_size):
    run_ranks(train_moved, world_size)
