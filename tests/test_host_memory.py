"""A process's arena: memory that comes and goes with tensors, is private to forked children, and has no name."""

import gc
import os

import pytest
import torch
from shardlight.ops.built import why_not_shared
from shardlight.ops.host_memory import ALIGNED_BYTES, Arena, arena

pytestmark = pytest.mark.skipif(why_not_shared() is not None, reason=f"no shared memory: {why_not_shared()}")


def used_bytes(memory: Arena) -> int:
    gc.collect()
    return os.fstat(memory.file).st_blocks * 512


def test_memory_is_taken_when_it_is_written_and_given_back_with_the_last_view():
    memory = Arena(1 << 30)
    tensor = memory.take(1 << 20, torch.float32)
    assert used_bytes(memory) == 0 and not tensor.any() and memory.holds(tensor) and not memory.holds(torch.ones(1))
    tensor.fill_(3)
    view = tensor[10:20].view(2, 5).t()
    del tensor
    assert used_bytes(memory) >= 4 << 20 and view.tolist() == [[3.0, 3.0]] * 5
    del view
    assert used_bytes(memory) == 0
    os.close(memory.file)


def test_addresses_are_used_again_in_any_order_of_going():
    memory = Arena(8 * ALIGNED_BYTES)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
        tensors = [memory.take(2 * ALIGNED_BYTES - 5, torch.uint8) for _ in range(4)]
        assert len({t.data_ptr() for t in tensors}) == 4 and memory.take(1, torch.uint8) is None
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        for number in order:
            assert (tensors[number] == number).all()
            tensors[number] = tensor = None
        whole = memory.take(8 * ALIGNED_BYTES, torch.uint8)
        assert whole is not None and not whole.any(), "what was given back comes as zeros"
        del whole
    assert memory.take(0, torch.float64).shape == (0,)
    os.close(memory.file)


def test_a_child_that_is_forked_writes_to_a_copy_and_has_an_arena_of_its_own():
    tensor = arena().take(1000, torch.float32).fill_(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = bool((tensor == 1).all())
        tensor.fill_(2)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if bool((tensor == 2).all()) else 1)
        kept = os.waitpid(grandchild, 0)[1] == 0
        own = arena().take(10, torch.float32).fill_(5)
        os.write(write, bytes([seen, kept, bool((own == 5).all()), arena().holds(own)]))
        os._exit(0)
    os.waitpid(child, 0)
    assert list(os.read(read, 10)) == [1, 1, 1, 1]
    assert (tensor == 1).all()
    os.close(read)
    os.close(write)


def test_a_system_that_gives_no_addresses_leaves_memory_private():
    with pytest.raises(OSError):
        Arena(1 << 62)
