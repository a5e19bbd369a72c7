"""The disk engine: every way of it against a bytearray, and everything that a disk can do wrong."""

import ctypes
import errno
import gc
import os
import random
import struct
import threading
import warnings
from pathlib import Path

import pytest
import torch
from shardlight.ops import built, disk, registry
from shardlight.ops.built import why_no_ring, why_not
from shardlight.ops.disk import BLOCK_BYTES, DiskEngine, DiskError, aligned

BYTES = torch.frombuffer(bytearray(random.Random(0).randbytes(8 << 20)), dtype=torch.uint8)
CALLS = {"preadv": os.preadv, "pwritev": os.pwritev}
SIZES = (0, 1, 3, 511, 4095, 4096, 4097)
PLACES = [(n, o, a) for n in SIZES for o in (0, 4096, 1, 4095, 12345) for a in (0, 1, 4095)]
PLACES += [((3 << 20) + 5, o, a) for o, a in ((0, 0), (4096, 1), (4095, 4095), (12345, 0))]


@pytest.fixture(params=["io_uring", "threads", "reference"])
def way(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr("shardlight.ops.registry.Op.native", lambda op, device: False)
    elif why_not() is not None:
        pytest.skip(f"compiled ops are not used: {why_not()}")
    elif request.param == "io_uring" and why_no_ring() is not None:
        pytest.skip(why_no_ring())
    return request.param


@pytest.fixture
def make(way):
    """Makes engines of a way, and closes them."""
    made = []

    def engine(**options):
        made.append(DiskEngine(way="auto" if way == "reference" else way, **options))
        assert made[-1].way == way
        return made[-1]

    yield engine
    for each in made:
        each.close()
    made.clear()


def at(offset, tensor):
    """The same numbers, `offset` bytes behind the start of a page."""
    memory = aligned(tensor.nbytes + offset + 1)
    return memory[offset : offset + tensor.nbytes].copy_(tensor)


def descriptor_of(path):
    """The descriptor of this process that is a file."""
    links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_link(fd)}
    (found,) = [fd for fd, target in links.items() if target == str(path)]
    return found


def is_link(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


def replaced(path, other):
    """Puts another file in the place of one that is open."""
    fd = os.open(other, os.O_RDWR)
    os.dup2(fd, descriptor_of(path))
    os.close(fd)


def spoil(engine, monkeypatch, most=2**63 - 1, after=-1, error=0):
    """From here on a call moves at most so many bytes, and the one after so many others fails."""
    if engine.way != "reference":
        return engine._core.queue.spoil(most, after, error)
    calls = iter(range(-after, 2**63))

    def spoilt(call):
        def instead(*args):
            if next(calls) == 0 and after >= 0:
                raise OSError(error, os.strerror(error))
            return min(most, call(*args))

        return instead

    for name in CALLS:
        monkeypatch.setattr(os, name, spoilt(CALLS[name]))


@pytest.mark.parametrize("direct", [True, False])
def test_every_size_at_any_offset_and_address_comes_back(make, tmp_path, direct):
    engine = make(piece_bytes=1 << 20, direct=direct)
    file = engine.open(tmp_path / "swap", len(BYTES), create=True)
    whole, written = aligned(len(BYTES)).copy_(BYTES), bytearray(BYTES.numpy())
    file.write(0, whole)
    for n, offset, address in PLACES:
        data = at(address, BYTES[-n - 77 : -77])
        file.write(offset, data)
        written[offset : offset + n] = bytes(data.numpy())
        out = at(address, torch.zeros(n, dtype=torch.uint8))
        file.read(offset, out)
        assert torch.equal(out, data), (n, offset, address)
    file.read(0, whole)
    assert bytes(whole.numpy()) == written == (tmp_path / "swap").read_bytes()
    assert (engine.direct, engine.why_not_direct) == ((True, None) if direct else (False, "direct=False is set"))


def test_every_dtype_and_shape_is_taken_where_it_lies(make, tmp_path):
    file = make().open(tmp_path / "swap", 1 << 16, create=True)
    for tensor in (torch.randn(3, 5), torch.randn(7).bfloat16()[2:], torch.tensor(True), torch.empty(0, 4)):
        file.write(100, tensor)
        out = torch.zeros_like(tensor)
        file.read(100, out)
        assert torch.equal(out, tensor)
    for tensor in (torch.ones(4, 4).t()[1:], torch.ones(2, device="meta"), torch.ones(2, dtype=torch.cfloat).conj()):
        with pytest.raises(ValueError, match="not contiguous memory"):
            file.write(0, tensor)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_are_not_waited_for_keep_the_programs_order(make, tmp_path, seed):
    drawn = random.Random(seed)
    n = 40 * BLOCK_BYTES
    engine = make(depth=drawn.choice([1, 3, 8]), piece_bytes=BLOCK_BYTES * drawn.choice([1, 2, 7]))
    file = engine.open(tmp_path / "swap", n, create=True)
    model, reads, requests = bytearray(n), [], []
    for _ in range(300):
        block = BLOCK_BYTES if drawn.random() < 0.4 else 1
        first, last = sorted(drawn.sample(range(n // block + 1), 2))
        first, last = first * block, min(last * block, first * block + drawn.choice([9, 5000, 9 * BLOCK_BYTES]))
        if drawn.random() < 0.5:
            data = at(drawn.choice([0, first % BLOCK_BYTES, 5]), BYTES[first + 3 : last + 3])
            data += drawn.randrange(256)
            model[first:last] = bytes(data.numpy())
            requests.append(file.start_write(first, data))
        else:
            out = at(drawn.choice([0, first % BLOCK_BYTES, 5]), torch.zeros(last - first, dtype=torch.uint8))
            requests.append(file.start_read(first, out))
            reads.append((out, bytes(model[first:last])))
        if drawn.random() < 0.1:
            requests.pop(drawn.randrange(len(requests))).wait()
    del requests[::2]
    engine.drain()
    assert all(r.done for r in requests) and all(bytes(out.numpy()) == want for out, want in reads)
    assert (tmp_path / "swap").read_bytes() == model
    for r in requests:
        r.wait()
    assert not engine._core.held


def test_a_queue_takes_more_than_its_depth_and_counts_what_it_moves(make, way, tmp_path):
    engine = make(depth=2, piece_bytes=BLOCK_BYTES)
    file = engine.open(tmp_path / "swap", 400 * BLOCK_BYTES, create=True)
    file.write(0, aligned(400 * BLOCK_BYTES))
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert way != "threads" or names.count("shardlight-disk\n") == 2
    blocks = [aligned(2 * BLOCK_BYTES).fill_(n) for n in range(200)]
    writes = [file.start_write(2 * BLOCK_BYTES * n, block) for n, block in enumerate(blocks)]
    outs = [aligned(2 * BLOCK_BYTES) for _ in blocks]
    reads = [file.start_read(2 * BLOCK_BYTES * n, out) for n, out in enumerate(outs)]
    for request in writes + reads:
        request.wait()
    assert all(torch.equal(a, b) for a, b in zip(blocks, outs, strict=True))
    assert (engine.bytes_read, engine.bytes_written) == (400 * BLOCK_BYTES, 800 * BLOCK_BYTES) and engine.waited_s > 0
    file.read(100, torch.empty(BLOCK_BYTES, dtype=torch.uint8))
    assert engine.bytes_read == 402 * BLOCK_BYTES
    file.write(100, torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8))
    assert (engine.bytes_read, engine.bytes_written) == (404 * BLOCK_BYTES, 803 * BLOCK_BYTES)


def test_aligned_memory_is_its_own_and_whole_blocks():
    for n, want in ((0, 0), (1, 4096), (4096, 4096), (4097, 8192)):
        made = aligned(n)
        assert (made.nbytes, made.dtype, made.data_ptr() % 4096) == (want, torch.uint8, 0)
        assert made.untyped_storage().nbytes() == want and not made.any()
    before = rss()
    made = aligned(64 << 20).fill_(1)
    assert rss() - before > 48 << 20
    del made
    assert rss() - before < 16 << 20


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_file_that_was_cut_short_is_an_error_and_not_old_or_missing_data(make, tmp_path):
    path = tmp_path / "swap"
    engine = make()
    file = engine.open(path, 5 * BLOCK_BYTES, create=True)
    os.truncate(path, 3 * BLOCK_BYTES)
    out = aligned(5 * BLOCK_BYTES).fill_(7)
    for start in (file.start_read, file.start_write):
        request = start(0, out)
        for _ in range(2):
            with pytest.raises(DiskError, match=rf"^{path}: the file is 12288 bytes, needs 20480 for 20480 bytes at"):
                request.wait()
    assert path.stat().st_size == 3 * BLOCK_BYTES and (out == 7).all()
    with pytest.raises(DiskError, match="file is 12288 bytes, needs 12289. Start with"):
        engine.open(path, 12289, create=False)
    for start in (file.start_read, file.start_write):
        for offset in (1, -1):
            with pytest.raises(DiskError, match=rf"offset {offset}: the file is 20480 bytes, needs {20480 + offset}"):
                start(offset, out)


@pytest.mark.case("C079")
def test_files_are_new_with_their_space_or_there_already(make, tmp_path):
    path = tmp_path / "swap"
    engine = make()
    with pytest.raises(DiskError, match="cannot be opened: No such file") as error:
        engine.open(path, 0, create=False)
    assert error.value.errno == errno.ENOENT
    (tmp_path / "file").touch()
    for folder, why in (("none", "No such file or directory. Check"), ("file", "Not a directory. Check the path")):
        with pytest.raises(DiskError, match=f"cannot be created: {why}"):
            engine.open(tmp_path / folder / "swap", 1, create=True)
    with pytest.raises(DiskError, match="cannot be opened: Is a directory. Give a file"):
        engine.open(tmp_path, 1, create=False)
    engine.open(path, 10_000, create=True).close()
    found = path.stat()
    assert (found.st_mode & 0o777, found.st_size) == (0o600, 12288) and found.st_blocks * 512 >= 12288
    with pytest.raises(DiskError, match="cannot be created: File exists. Remove it"):
        engine.open(path, 10_000, create=True)
    assert engine.open(path, 10_000, create=False).nbytes == 12288
    os.truncate(path, 10_000)
    odd = engine.open(path, 9000, create=False)
    assert odd.nbytes == 10_000 and not engine.direct and "10000 bytes is no multiple" in engine.why_not_direct
    data = BYTES[:9999].clone()
    odd.write(1, data)
    odd.read(1, data.zero_())
    assert torch.equal(data, BYTES[:9999]) and path.stat().st_size == 10_000
    engine.open(tmp_path / "empty", 0, create=True).read(0, torch.empty(0))


def test_a_file_that_grows_keeps_what_it_has(make, tmp_path):
    file = make().open(tmp_path / "file", 4096, create=True)
    file.write(0, torch.full((4096,), 7, dtype=torch.uint8))
    file.grow(20_000)
    assert file.nbytes == (tmp_path / "file").stat().st_size == 20_480
    file.write(16_384, torch.full((4096,), 9, dtype=torch.uint8))
    out = aligned(20_480)
    file.read(0, out)
    assert out[:4096].eq(7).all() and out[4096:16_384].eq(0).all() and out[16_384:].eq(9).all()
    file.grow(4096)
    assert file.nbytes == (tmp_path / "file").stat().st_size == 20_480
    with pytest.raises(DiskError, match="cannot reserve"):
        file.grow(1 << 60)
    assert (tmp_path / "file").stat().st_size == 20_480


def test_a_full_disk_is_told_when_its_space_is_reserved_and_when_it_is_written(make, tmp_path):
    found = []

    def inside():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None):
            return found.append("needs the right to mount")  # CLONE_NEWNS; MS_REC | MS_PRIVATE
        if libc.mount(b"none", str(tmp_path).encode(), b"tmpfs", 0, b"size=1m"):
            return found.append("needs the right to mount")
        engine = make()
        with pytest.raises(DiskError, match=r"cannot reserve 2097152 bytes: No space .*\(ENOSPC\). 1048576 bytes are"):
            engine.open(tmp_path / "swap", 2 << 20, create=True)
        assert list(tmp_path.iterdir()) == []
        small = engine.open(tmp_path / "small", 1 << 18, create=True)
        with pytest.raises(DiskError, match=r"small: cannot reserve 2097152 bytes: .*\(ENOSPC\)"):
            small.grow(2 << 20)
        assert small.nbytes == (tmp_path / "small").stat().st_size == 1 << 18
        (tmp_path / "sparse").touch()
        os.truncate(tmp_path / "sparse", 2 << 20)
        file = engine.open(tmp_path / "sparse", 2 << 20, create=False)
        with pytest.raises(
            DiskError, match=r"sparse: cannot write 2097152 bytes at offset 0: .*\(ENOSPC\). \d"
        ) as error:
            file.write(0, aligned(2 << 20).fill_(1))
        found.append(error.value.errno)
        engine.close()

    thread = threading.Thread(target=inside)  # what it mounts is its own
    thread.start()
    thread.join()
    if found and isinstance(found[0], str):
        pytest.skip(found[0])
    assert found == [errno.ENOSPC]


def test_a_file_that_fails_is_named_with_the_systems_reason(make, tmp_path, monkeypatch):
    engine = make(piece_bytes=BLOCK_BYTES)
    files = [engine.open(tmp_path / name, 8 * BLOCK_BYTES, create=True) for name in ("full", "null", "bad")]
    data = aligned(8 * BLOCK_BYTES)
    replaced(tmp_path / "full", "/dev/full")
    with pytest.raises(DiskError, match=r"full: cannot write 32768 bytes at offset 0: .*\(ENOSPC\)"):
        files[0].write(0, data)
    replaced(tmp_path / "null", "/dev/null")
    with pytest.raises(DiskError, match=r"null: cannot read 4096 bytes at offset 8192: .*\(EIO\). The disk") as error:
        files[1].read(8192, data[:4096])
    assert error.value.errno == errno.EIO and isinstance(error.value, OSError)
    for after in (0, 3, 7):
        for start in (files[2].start_read, files[2].start_write):
            spoil(engine, monkeypatch, after=after, error=errno.EIO)
            with pytest.raises(DiskError, match=r"bad: cannot (read|write) 32768 bytes at offset 0: .*\(EIO\)"):
                start(0, data).wait()
            start(0, data).wait()
    files[2].close()
    engine = make()
    files[2] = engine.open(tmp_path / "bad", 8 * BLOCK_BYTES, create=False)
    for after in range(3):  # both ends are read before the write
        spoil(engine, monkeypatch, after=after, error=errno.EIO)
        with pytest.raises(
            DiskError, match=f"cannot {'write' if after == 2 else 'read'} 4096 bytes at offset 9: .*EIO"
        ):
            files[2].write(9, BYTES[:4096])
    for interrupted in (errno.EINTR, errno.EAGAIN):
        spoil(engine, monkeypatch, after=1, error=interrupted)
        files[2].write(9, BYTES[:4096])
    files[2].read(9, data[:4096])
    assert torch.equal(data[:4096], BYTES[:4096])


@pytest.mark.parametrize(("direct", "most"), [(True, 4096), (True, 13000), (False, 1000)])
def test_what_the_system_moves_in_part_is_gone_on_with(make, tmp_path, monkeypatch, direct, most):
    engine = make(direct=direct)
    file = engine.open(tmp_path / "swap", 1 << 17, create=True)
    spoil(engine, monkeypatch, most=most)
    for offset, address in ((0, 0), (12, 12), (12, 5)):
        data = at(address, BYTES[: 1 << 16])
        file.write(offset, data)
        out = torch.zeros_like(data)
        file.read(offset, out)
        assert torch.equal(data, out)
    assert (tmp_path / "swap").read_bytes()[12 : 12 + (1 << 16)] == bytes(BYTES[: 1 << 16].numpy())
    if direct:
        spoil(engine, monkeypatch, most=511)
        with pytest.raises(DiskError, match="EIO"):
            file.read(0, aligned(8192))


def test_a_failure_that_nobody_waited_for_is_told_in_the_end(make, tmp_path, monkeypatch):
    engine = make()
    file = engine.open(tmp_path / "swap", 1 << 16, create=True)
    data = aligned(1 << 16)
    for end in (engine.drain, file.close, engine.close):
        if end == engine.close:
            file = engine.open(tmp_path / "swap", 1 << 16, create=False)
        spoil(engine, monkeypatch, after=0, error=errno.EIO)
        held = file.start_write(0, data) if end == engine.drain else None
        if held is None:
            file.start_write(0, data)  # and the request is gone
        with pytest.raises(DiskError, match="swap: cannot write 65536 bytes at offset 0"):
            end()
        if held is not None:
            end()
            with pytest.raises(DiskError, match="swap: cannot write 65536 bytes at offset 0"):
                held.wait()
        if end != engine.drain:
            end()
            with pytest.raises(DiskError, match="closed"):
                file.start_read(0, data)
    with pytest.raises(DiskError, match="its engine is closed"):
        engine.open(tmp_path / "swap", 1 << 16, create=False)


def test_a_read_of_what_could_not_be_written_fails(make, tmp_path, monkeypatch):
    engine = make(depth=4)
    file = engine.open(tmp_path / "swap", 1 << 16, create=True)
    engine._core.queue.freeze()
    spoil(engine, monkeypatch, after=0, error=errno.EIO)
    requests = [
        file.start_write(0, aligned(8192)),
        file.start_read(4096, aligned(8192)),
        file.start_write(5, BYTES[:9]),
    ]
    engine._core.queue.thaw()
    for request in requests[:2]:
        with pytest.raises(DiskError, match=r"EIO") as error:
            request.wait()
    assert "cannot read 8192 bytes at offset 4096: an earlier write of them failed" in str(error.value)
    requests[2].wait()
    file.read(8192, aligned(4096))


def test_what_is_under_way_ends_before_its_engine_and_its_memory_do(make, way, tmp_path):
    for how in ("dropped", "closed"):
        engine = DiskEngine(way="auto" if way == "reference" else way, depth=2, piece_bytes=1 << 14)
        file = engine.open(tmp_path / how, 4 << 20, create=True)
        for n in range(4):
            file.start_write(n << 20, aligned(1 << 20).fill_(n + 1))
        threads = threading.active_count()
        if how == "closed":
            late = file.start_read(0, aligned(4096))
            engine.close()
            assert late.done
            late.wait()
        del engine, file
        gc.collect()
        assert (tmp_path / how).read_bytes() == b"".join(bytes([n + 1]) * (1 << 20) for n in range(4))
        with pytest.raises(ValueError):
            descriptor_of(tmp_path / how)
    assert threading.active_count() <= threads


def in_child(body):
    """Runs a function in a forked child; returns whether all of it ran."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and forks
        child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_has_no_part_in_its_parents_engine(make, way, tmp_path):
    engine = make(depth=4, piece_bytes=1 << 16)
    file = engine.open(tmp_path / "swap", 2 << 20, create=True)
    data = aligned(2 << 20).copy_(BYTES[: 2 << 20])
    request = file.start_write(0, data)

    def child():
        for refused in (lambda: file.read(0, data), request.wait, engine.drain, lambda: engine.bytes_read):
            with pytest.raises(DiskError, match="belongs to process .* Make a DiskEngine of its own"):
                refused()
        own = DiskEngine(way=engine.way if way != "reference" else "auto")
        with own.open(tmp_path / "child", 4096, create=True) as other:
            other.write(5, BYTES[:100])
        own.close()
        engine.close()
        gc.collect()

    assert in_child(child)
    request.wait()
    file.read(0, data.zero_())
    assert torch.equal(data, BYTES[: 2 << 20]) and (tmp_path / "child").read_bytes()[5:105] == bytes(
        BYTES[:100].numpy()
    )


@pytest.mark.skipif(why_not() is not None, reason=f"compiled ops are not used: {why_not()}")
def test_where_the_system_forbids_io_uring_threads_do_it_and_say_so(tmp_path):
    def child():
        # A filter of system calls as containers have it: 425 is io_uring_setup.
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        given = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, given, 0, 0) == 0
        built.why_no_ring.cache_clear()
        engine = DiskEngine()
        (row,) = [row for row in registry.table() if row["op"] == "disk"]
        assert row["chosen"] == "CPU: native" and row["why"] == f"CPU: it loads, {engine.why}"
        assert engine.way == "threads" and "io_uring is refused with EPERM: a container's" in engine.why
        engine.open(tmp_path / "swap", 4096, create=True).write(0, BYTES[:4096])
        with pytest.raises(DiskError, match="EPERM.* Set way to 'auto' or 'threads'"):
            DiskEngine(way="io_uring")
        engine.close()

    assert in_child(child)
    assert (tmp_path / "swap").read_bytes() == bytes(BYTES[:4096].numpy())


def test_a_file_system_without_direct_io_is_used_without_it(make, tmp_path, monkeypatch):
    real = disk.open_file.__globals__["fcntl"].fcntl

    def refusing(fd, command, *given):
        if given and given[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, *given)

    monkeypatch.setattr("fcntl.fcntl", refusing)
    engine = make()
    file = engine.open(tmp_path / "swap", 1 << 16, create=True)
    file.write(77, BYTES[:5000])
    file.read(77, out := torch.zeros(5000, dtype=torch.uint8))
    assert torch.equal(out, BYTES[:5000]) and (engine.bytes_read, engine.bytes_written) == (5000, 5000)
    assert not engine.direct and "swap: its file system takes no O_DIRECT" in engine.why_not_direct


def test_options_that_there_are_not_are_refused():
    for options in ({"way": "fast"}, {"depth": 0}, {"piece_bytes": 0}, {"piece_bytes": 1 << 40}):
        with pytest.raises(
            ValueError, match=r"way is one of auto, io_uring, threads, depth 1 to 1024, piece_bytes 1 to"
        ):
            DiskEngine(**options)
