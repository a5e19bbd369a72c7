"""CRC-32: each way of computing it against zlib's."""

import mmap
import random
import subprocess
import sys
import threading
import time
import zlib

import pytest
import torch
from shardlight.ops import crc32 as op
from shardlight.ops.built import OPS_VARIABLE, why_not
from shardlight.ops.crc32 import WAYS, best_way, crc32, crc32_chunks

BYTES = random.Random(0).randbytes(1 << 20)
native = pytest.mark.skipif(why_not() is not None, reason=f"compiled ops are not used: {why_not()}")


@pytest.fixture(params=["reference", *(pytest.param(way, marks=native) for way in WAYS)])
def way(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr("shardlight.ops.registry.Op.native", lambda op, device: False)
    elif WAYS.index(request.param) > best_way():
        pytest.skip(f"this processor cannot do '{request.param}'")
    else:
        monkeypatch.setattr(op, "best_way", lambda: WAYS.index(request.param))


def test_every_length_at_any_place_has_zlibs_value(way):
    assert crc32(b"123456789") == 0xCBF43926
    view = memoryview(BYTES)
    for n in range(1101):
        at = n * 7 % 64
        for start in (0, 0xFFFFFFFF, n * 0x9E3779B1):
            assert crc32(view[at : at + n], start) == zlib.crc32(view[at : at + n], start), (n, at, start)


def test_parts_after_each_other_have_the_value_of_the_whole(way):
    drawn, view = random.Random(1), memoryview(BYTES)
    for _ in range(20):
        cuts = sorted(drawn.sample(range(len(view)), 12))
        found = 0
        for first, last in zip([0, *cuts], [*cuts, len(view)], strict=True):
            found = crc32(view[first:last], found)
        assert found == zlib.crc32(view)


def test_every_bit_counts(way):
    for n in (5, 64, 300, 1023):
        data = bytearray(BYTES[:n])
        want = crc32(data)
        for bit in range(8 * n):
            data[bit // 8] ^= 1 << bit % 8
            assert crc32(data) != want
            data[bit // 8] ^= 1 << bit % 8


def test_chunks_are_counted_each_by_itself_with_any_number_of_threads(way):
    for n, chunk in ((0, 1), (1, 1), (1000, 1000), (1001, 1000), (70_001, 1024), (70_001, 1 << 20), (len(BYTES), 4097)):
        want = [zlib.crc32(BYTES[at : min(n, at + chunk)]) for at in range(0, n, chunk)]
        for threads in (1, 2, 5):
            assert crc32_chunks(memoryview(BYTES)[:n], chunk, threads) == want
    with pytest.raises(ValueError, match="chunk_bytes is 0"):
        crc32_chunks(BYTES, 0)


def test_tensors_and_memory_that_is_read_only_are_taken_where_they_lie(way, tmp_path):
    for tensor in (torch.randn(3, 5), torch.arange(7, dtype=torch.bfloat16)[2:], torch.tensor(True), torch.empty(0, 4)):
        raw = bytes(tensor.clone().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        assert crc32(tensor, 3) == zlib.crc32(raw, 3) and crc32_chunks(tensor, 1 << 30) == [zlib.crc32(raw)][: len(raw)]
    (tmp_path / "file").write_bytes(BYTES)
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert crc32(mapped) == zlib.crc32(BYTES)
    wide = memoryview(BYTES[:64]).cast("I", (4, 4))
    assert crc32(wide) == zlib.crc32(BYTES[:64])
    for apart in (torch.ones(4, 4).t()[1:], memoryview(BYTES)[::2], torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="not contiguous"):
            crc32(apart)


@native
def test_a_way_that_the_processor_lacks_is_an_error():
    with pytest.raises(RuntimeError, match="cannot do"):
        op._run(*op._memory(BYTES)[:2], 64, 0, -1, 1)


@native
def test_other_threads_run_meanwhile():
    data, ran, stop = bytearray(64 << 20), [], threading.Event()

    def count():
        while not stop.wait(0.001):
            ran.append(time.perf_counter())

    other = threading.Thread(target=count)
    other.start()
    try:
        while not ran:
            time.sleep(0.001)
        for _ in range(20):  # a busy machine may run the other thread late
            began_s = time.perf_counter()
            op._run(*op._memory(data)[:2], len(data), 0, 0, 1)
            ended_s = time.perf_counter()
            if any(began_s < at < ended_s for at in ran):
                break
    finally:
        stop.set()
        other.join()
    assert any(began_s < at < ended_s for at in ran)


def test_needs_no_torch():
    code = "import sys; from shardlight.ops.crc32 import crc32; print(crc32(b'123456789'), 'torch' in sys.modules)"
    for environment in ({}, {OPS_VARIABLE: "reference"}):
        made = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert made.stdout == f"{0xCBF43926} False\n", made.stderr
