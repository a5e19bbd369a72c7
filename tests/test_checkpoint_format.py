"""The files of a checkpoint: boxes, the manifest, checksums; what is damaged or hostile is refused before it is used."""

import hashlib
import json
import math
import os
import pickle
import random
import subprocess
import sys
import zlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from shardlight.strategies.checkpoint import disk, safetensors_file
from shardlight.strategies.checkpoint.disk import write_file
from shardlight.strategies.checkpoint.dtypes import TORCH_DTYPES
from shardlight.strategies.checkpoint.manifest import CHUNK_BYTES, ITEMSIZE, MANIFEST, Manifest
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.trainer_state import _join
from shardlight.strategies.checkpoint.writer import RankWriter
from shardlight.strategies.engine.boxes import Box, boxes_of_range, whole
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.errors import CheckpointError

SHAPES = [(), (0, 3), (5,), (3, 4), (2, 3, 2), (2, 1, 3, 2), (1, 1)]


def test_a_range_is_a_few_boxes_in_order():
    for shape in SHAPES:
        n = math.prod(shape)
        tensor = torch.arange(n).view(shape)
        for start in range(n + 1):
            for stop in range(start, n + 1):
                boxes = list(boxes_of_range(shape, start, stop))
                assert len(boxes) <= max(1, 2 * len(shape) - 1)
                assert all(b.fits(shape) and (not b.numel or b.is_run(shape)) for b in boxes)
                parts = [
                    tensor[tuple(map(slice, b.offsets, map(sum, zip(b.offsets, b.sizes, strict=True))))] for b in boxes
                ]
                assert [x for p in parts for x in p.reshape(-1).tolist()] == list(range(start, stop))


def test_what_two_boxes_have_in_common():
    box = Box((1, 2), (3, 4))
    assert box.common(Box((2, 0), (9, 3))) == Box((2, 2), (2, 1))
    assert box.common(Box((4, 0), (1, 9))) is None
    assert Box((2, 3), (2, 1)).span(box) == (5, 10) and not box.is_run((9, 9)) and whole((9, 9)).is_run((9, 9))


def write_checkpoint(folder, per_rank, content=None):
    """Writes a checkpoint of what each rank adds: [(name, tensor, shape, start)]."""
    folder.mkdir()
    files, pieces = [], []
    for rank, held in enumerate(per_rank):
        writer = RankWriter(rank)
        for name, tensor, shape, start in held:
            writer.add(name, tensor, None if shape is None else Slice.whole(shape), start)
        file, mine = writer.write(folder)
        files.append(file)
        pieces += mine
    write_file(folder / MANIFEST, Manifest(content or {}, files, _join(pieces)).to_bytes())
    return folder


def cut(name, tensor, edges):
    """Each rank's range of a tensor."""
    flat, bounds = tensor.reshape(-1), [0, *edges, tensor.numel()]
    return [(name, flat[a:b], tuple(tensor.shape), a) for a, b in pairwise(bounds)]


def of_every_dtype(numel):
    for dtype in TORCH_DTYPES.values():
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
        yield dtype, bits.view(dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_range_comes_back_from_any_cut_in_every_dtype(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    numel, world = math.prod(shape), data.draw(st.integers(1, 4))
    torch.manual_seed(numel)
    tensors = {str(dtype): flat.view(shape) for dtype, flat in of_every_dtype(numel)}
    per_rank = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        edges = sorted(data.draw(st.lists(st.integers(0, numel), min_size=world - 1, max_size=world - 1)))
        for rank, piece in enumerate(cut(name, tensor, edges)):
            if piece[1].numel() or (not numel and rank == 0):
                per_rank[rank].append(piece)
    reader = CheckpointReader(write_checkpoint(tmp_path_factory.mktemp("x") / "c", per_rank))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    for name, tensor in tensors.items():
        assert reader.dtype(name) == tensor.dtype and reader.shape(name) == shape
        assert torch.equal(bits(reader.read(name)), bits(tensor)) and reader.read(name).shape == shape
        assert torch.equal(bits(reader.read(name, start, stop)), bits(tensor.reshape(-1)[start:stop]))


def test_blocks_of_columns_are_read_as_rows(tmp_path):
    """What tensor parallelism will store: the manifest is general, though today's writer stores ranges."""
    whole_tensor = torch.arange(24.0).view(4, 6)
    left, right = whole_tensor[:, :2].contiguous(), whole_tensor[:, 2:].contiguous()
    folder = write_checkpoint(tmp_path / "c", [[("a", left, None, 0), ("b", right, None, 0)]])
    edit(
        folder,
        lambda c: c["tensors"].update(
            w={
                "dtype": "F32", "shape": [4, 6],
                "pieces": [
                    [0, c["tensors"].pop("a")["pieces"][0][1], [0, 0], [4, 2]],
                    [0, c["tensors"].pop("b")["pieces"][0][1], [0, 2], [4, 4]],
                ],
            }
        ),
    )  # fmt: skip
    reader = CheckpointReader(folder)
    assert torch.equal(reader.read("w"), whole_tensor)
    assert torch.equal(reader.read("w", 4, 21), whole_tensor.reshape(-1)[4:21])


def test_parts_of_any_size_make_one_file_with_a_checksum_of_each_chunk(tmp_path, monkeypatch):
    drawn, begun = random.Random(0), []
    monkeypatch.setattr(safetensors_file, "start_writing", lambda file, start, nbytes: begun.append((start, nbytes)))
    sizes = [
        0,
        1,
        70_000,
        CHUNK_BYTES,
        3 * CHUNK_BYTES + 5,
        9 << 20,
        12,
        *(drawn.choices([7, 65_535, 65_536], k=60)),
    ]
    for number, order in enumerate((sizes, sizes[::-1], [], [CHUNK_BYTES] * 2)):
        parts = [drawn.randbytes(n) for n in order]
        file = safetensors_file.ChecksummedFile(tmp_path / str(number))
        for part in parts:
            file.write(part)
        stored, whole_file = file.finish(), b"".join(parts)
        assert (tmp_path / str(number)).read_bytes() == whole_file and stored.nbytes == len(whole_file)
        chunks = (whole_file[at : at + CHUNK_BYTES] for at in range(0, len(whole_file), CHUNK_BYTES))
        assert stored.crc32 == tuple(map(zlib.crc32, chunks))
        ends = [0, *(start + nbytes for start, nbytes in begun)]
        assert [start for start, _ in begun] == ends[:-1] and ends[-1] <= len(whole_file)
        assert bool(begun) == (number < 2)
        begun.clear()


def test_the_system_may_refuse_to_begin_with_writing(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        disk.start_writing(file.fileno(), 0, 1 << 20)
    disk.start_writing(file_of_a_pipe := os.pipe()[1], 0, 1)
    os.close(file_of_a_pipe)


def test_what_is_damaged_is_never_taken_for_read(tmp_path):
    """Neither what goes straight into a tensor nor what is kept of a chunk that was read before."""
    value = torch.arange(3 * CHUNK_BYTES // 4 + 10.0)
    write_checkpoint(tmp_path / "a", [[("model/x", value, value.shape, 0)]])
    path = tmp_path / "a/rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    for at in (5_000, CHUNK_BYTES + 7, len(data) - 3):
        reader = CheckpointReader(tmp_path / "a")
        data[at] ^= 16
        path.write_bytes(data)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="damaged between byte"):
                reader.read("model/x")
        with pytest.raises(CheckpointError, match="damaged between byte"):
            reader.read("model/x", max(0, at // 4 - 300), min(len(value), at // 4 + 5))
        data[at] ^= 16
        path.write_bytes(data)
        assert torch.equal(reader.read("model/x"), value) and torch.equal(reader.read("model/x", 3, 9), value[3:9])


def test_a_rank_s_file_is_a_safetensors_file(tmp_path):
    tensor = torch.arange(12.0).view(3, 4)
    folder = write_checkpoint(
        tmp_path / "c", [[*cut("w", tensor, [5])[:1], ("n", torch.tensor(3), None, 0)], cut("w", tensor, [5])[1:]]
    )
    first, second = (load_file(folder / f"rank-0000{r}.safetensors") for r in (0, 1))
    assert torch.equal(first["w[0:1,0:4]"], tensor[:1]) and torch.equal(first["w[1:2,0:1]"], tensor[1:2, :1])
    assert torch.equal(second["w[2:3,0:4]"], tensor[2:]) and first["n"].shape == ()


def test_values_are_converted_to_what_they_are_read_into(tmp_path):
    folder = write_checkpoint(tmp_path / "c", [[("w", torch.arange(7, dtype=torch.bfloat16), None, 0)]])
    out = torch.zeros(3)
    CheckpointReader(folder).read_into(out, "w", 2)
    assert out.tolist() == [2.0, 3.0, 4.0]


def test_autograd_knows_of_what_is_read_into_a_tensor(tmp_path):
    folder = write_checkpoint(tmp_path / "c", [[("w", torch.arange(3.0), None, 0)]])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    CheckpointReader(folder).read_into(weight.detach(), "w")
    assert weight.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def sample(folder):
    """A checkpoint of two files of several chunks, with a small tensor of every dtype."""
    torch.manual_seed(0)
    large = torch.randn(700_001)
    per_rank = cut("model/large", large, [333_333])
    small = [(f"small/{dtype}", flat, None, 0) for dtype, flat in of_every_dtype(3)]
    return write_checkpoint(folder, [[per_rank[0], *small], [per_rank[1]]], {"step": 3, "names": ["a", "b"]})


def read_all(folder):
    reader = CheckpointReader(folder)
    reader.verify()
    return reader


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.mark.parametrize("tries", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_flipped_bit_is_found_before_anything_is_read(tries, tmp_path):
    folder = sample(tmp_path / "c")
    read_all(folder)
    rng = random.Random(1)
    paths = sorted(folder.iterdir())
    assert len(paths) == 3
    for number in range(tries):
        path = paths[number % 3]
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(CheckpointError, match=re_of(path)):
            read_all(folder)
        flip(path, bit)
    read_all(folder)


def re_of(path):
    return path.name.replace(".", r"\.")


def test_what_is_cut_short_longer_missing_or_exchanged_is_found(tmp_path):
    folder = sample(tmp_path / "c")
    rng = random.Random(2)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for length in [0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(8))]:
            path.write_bytes(data[:length])
            with pytest.raises(CheckpointError):
                read_all(folder)
        path.write_bytes(data + b"\0")
        with pytest.raises(CheckpointError):
            read_all(folder)
        path.unlink()
        with pytest.raises(CheckpointError, match=r"is missing|has no manifest"):
            read_all(folder)
        path.write_bytes(data)
    other = sample(tmp_path / "other")
    first, second = (folder / f"rank-0000{r}.safetensors" for r in (0, 1))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes().ljust(len(data), b"\0")[: len(data)])
    with pytest.raises(CheckpointError, match="CRC-32"):
        read_all(folder)
    first.write_bytes(data)
    read_all(folder), read_all(other)


def test_a_damaged_byte_is_named_and_only_who_reads_it_stops(tmp_path):
    folder = sample(tmp_path / "c")
    path = folder / "rank-00001.safetensors"
    flip(path, 8 * (CHUNK_BYTES + 5))
    reader = CheckpointReader(folder)
    assert reader.read("model/large", 0, 333_333).shape == (333_333,)
    with pytest.raises(CheckpointError, match=r"rank-00001.* damaged between byte 262,144 and 524,288: .*CRC-32"):
        reader.read("model/large")
    reader.verify(wanted=lambda name: name.startswith("small/"))
    shares = []
    for rank in range(3):
        try:
            CheckpointReader(folder).verify((rank, 3))
            shares.append(True)
        except CheckpointError:
            shares.append(False)
    assert sorted(shares) == [False, True, True], "each rank has its share of the chunks"


# --- hostile files


def sign(folder, text):
    """Writes a manifest with the given content and a digest that fits: what somebody who wants to harm would do."""
    data = (text if isinstance(text, str) else json.dumps(text)).encode(errors="surrogateescape") + b"}\n"
    digest = hashlib.sha256(data).hexdigest()
    head = f'{{"format": "shardlight-checkpoint", "version": 2, "sha256": "{digest}",\n"content": '
    (folder / MANIFEST).write_bytes(head.encode() + data)


def content_of(folder):
    return json.loads((folder / MANIFEST).read_text())["content"]


def edit(folder, change):
    content = content_of(folder)
    change(content)
    sign(folder, content)


def set_piece(index, value):
    return lambda c: c["tensors"]["w"]["pieces"][0].__setitem__(index, value)


def add_piece(c):
    c["tensors"]["w"]["pieces"].append(c["tensors"]["w"]["pieces"][0])


def split_and_overlap(c):
    [[file, at, _, _]] = c["tensors"]["w"]["pieces"]
    c["tensors"]["w"]["pieces"] = [[file, at, [0, 0], [2, 4]], [file, at + 16, [1, 0], [1, 4]]]


def blocks_overlap(c):
    [[file, at, _, _]] = c["tensors"]["w"]["pieces"]
    c["tensors"]["w"]["pieces"] = [[file, at, [0, 0], [3, 2]], [file, at + 24, [0, 1], [3, 2]]]


def same_bytes(c):
    c["tensors"]["v"] = {**c["tensors"]["w"]}


HOSTILE = {
    "a path out of the folder": (lambda c: c["files"][0].update(name="../rank-00000.safetensors"), "no name of a file"),
    "an absolute path": (lambda c: c["files"][0].update(name="/etc/passwd"), "no name of a file"),
    "another file's name": (lambda c: c["files"][0].update(name="pytorch_model.bin"), "no name of a file"),
    "a file twice": (lambda c: c["files"].append(c["files"][0]), "two files have one name"),
    "a negative size of a file": (lambda c: c["files"][0].update(bytes=-1), "not a size"),
    "a file of exabytes": (lambda c: c["files"][0].update(bytes=1 << 60), "the checksums do not fit"),
    "no checksums": (lambda c: c["files"][0].update(crc32=""), "the checksums do not fit"),
    "a negative offset": (set_piece(2, [-1, 0]), "not a size or a position"),
    "a negative size": (set_piece(3, [-3, 4]), "not a size or a position"),
    "a fractional size": (set_piece(3, [3.0, 4]), "not a size or a position"),
    "true as a size": (set_piece(3, [True, 4]), "not a size or a position"),
    "a box outside of its tensor": (set_piece(2, [1, 0]), "is outside of shape"),
    "a box of other dims": (set_piece(3, [12]), "is outside of shape"),
    "bytes outside of the file": (set_piece(1, 1 << 40), "outside of the checkpoint's files"),
    "a file that is not there": (set_piece(0, 7), "outside of the checkpoint's files"),
    "a piece twice": (add_piece, "pieces overlap"),
    "ranges that overlap": (split_and_overlap, "8 of 12|overlap|elements are missing"),
    "blocks that overlap": (blocks_overlap, "overlap"),
    "elements that are missing": (set_piece(3, [2, 4]), "4 of 12 elements are missing"),
    "a shape of exabytes": (lambda c: c["tensors"]["w"].update(shape=[1 << 61, 1 << 61]), "elements are missing"),
    "a shape of a thousand dims": (lambda c: c["tensors"]["w"].update(shape=[1] * 1000), "dims are too many"),
    "two tensors in the same bytes": (same_bytes, "tensors overlap"),
    "a dtype that is a class": (lambda c: c["tensors"]["w"].update(dtype="os.system"), "is not a dtype"),
    "a dtype that is a list": (lambda c: c["tensors"]["w"].update(dtype=["F32"]), "is not a dtype"),
    "tensors as a list": (lambda c: c.update(tensors=[]), "is not a dict"),
    "no files": (lambda c: c.pop("files"), "cannot be read"),
    "a tie to nothing": (lambda c: c.update(aliases={"x": {}}), "tied to {}"),
    "chunks of one byte": (lambda c: c.update(chunk_bytes=1), "chunk_bytes is 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name, tmp_path):
    folder = write_checkpoint(tmp_path / "c", [[("w", torch.arange(12.0).view(3, 4), None, 0)]])
    edit(folder, lambda c: None)
    read_all(folder)
    change, message = HOSTILE[name]
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_all(folder)


TEXTS = {
    "a key twice": ('{"files": [], "files": [], "tensors": {}, "chunk_bytes": 1048576}', "a key is there twice"),
    "nested lists without end": ("[" * 200_000 + "]" * 200_000, "RecursionError|not a dict|recursion"),
    "NaN": ('{"step": NaN}', "NaN is not JSON"),
    "an integer of a million digits": ('{"step": ' + "9" * 1_000_000 + "}", "cannot be read"),
    "a list": ("[]", "is not a dict"),
    "half of it": ('{"files": [', "cannot be read"),
    "not UTF-8": ('{"\udcff": 1}', "cannot be read"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_manifest_that_is_no_plain_json_is_refused(name, tmp_path):
    text, message = TEXTS[name]
    sign(tmp_path, text)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_a_manifest_of_another_kind_or_size_is_refused(tmp_path):
    for content, message in (
        ("{}", "not a manifest of shardlight-checkpoint"),
        ('{"format": "shardlight-checkpoint", "version": 1, "pieces": [{}]}', "written by an earlier version"),
    ):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(CheckpointError, match=message):
            CheckpointReader(tmp_path)
    sign(tmp_path, "{}")
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"version": 2', '"version": 3'))
    with pytest.raises(CheckpointError, match="version 3; this is"):
        CheckpointReader(tmp_path)
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="which no manifest has"):
        CheckpointReader(tmp_path)


def test_a_checkpoint_with_chunks_of_a_mebibyte_opens(tmp_path):
    """As they were before."""
    folder, old = sample(tmp_path / "c"), 1 << 20
    values = {n: read_all(folder).read(n) for n in read_all(folder).names()}

    def widen(content):
        content["chunk_bytes"] = old
        for file in content["files"]:
            data = (folder / file["name"]).read_bytes()
            file["crc32"] = "".join(f"{zlib.crc32(data[at : at + old]):08x}" for at in range(0, len(data), old))

    edit(folder, widen)
    reader = read_all(folder)
    assert all(torch.equal(bits(reader.read(n)), bits(v)) for n, v in values.items())
    assert torch.equal(reader.read("model/large", 270_001, 600_003), values["model/large"][270_001:600_003])
    (folder / MANIFEST).write_bytes(Manifest(reader.content, reader.files, reader.tensors).to_bytes())
    assert Manifest.read(folder).files == reader.files
    flip(folder / "rank-00001.safetensors", 8 * (old + 5))
    with pytest.raises(CheckpointError, match=r"rank-00001.* damaged between byte 1,048,576 and 1,4.*CRC-32"):
        read_all(folder)


def test_links_and_pipes_are_not_followed(tmp_path):
    folder = sample(tmp_path / "c")
    file = folder / "rank-00001.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        CheckpointReader(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        CheckpointReader(folder)
    file.unlink()
    (tmp_path / "elsewhere").rename(file)
    reader = CheckpointReader(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        reader.verify()
    (folder / MANIFEST).rename(tmp_path / "m")
    (folder / MANIFEST).symlink_to(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        CheckpointReader(folder)


def test_a_tensor_that_cannot_be_stored_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"^'model/w' is a tensor of torch.sparse_coo, which cannot be stored"):
        RankWriter(0).add("model/w", torch.eye(3).to_sparse())
    assert set(TORCH_DTYPES) == set(ITEMSIZE)
    assert all(TORCH_DTYPES[n].itemsize == size for n, size in ITEMSIZE.items())


def test_opening_needs_no_torch_for_the_manifest():
    code = (
        "import sys; from shardlight.strategies.checkpoint.manifest import Manifest; "
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pickles_under_every_name_are_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    bomb = pickle.dumps(Bomb())
    for name in ("manifest.json", "rank-00000.safetensors"):
        folder = write_checkpoint(tmp_path / name, [[("w", torch.arange(12.0), None, 0)]])
        (folder / name).write_bytes(bomb)
        with pytest.raises(CheckpointError):
            read_all(folder)
    folder = write_checkpoint(tmp_path / "beside", [[("w", torch.arange(12.0), None, 0)]])
    for name in ("meta.pt", "data.pkl", ".metadata", "optimizer.bin", "rank-00001.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(bomb)
    assert read_all(folder).read("w").tolist() == list(range(12))
    assert not (tmp_path / "exploded").exists()
