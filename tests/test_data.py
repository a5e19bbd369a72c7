"""Token files and windows: every token once, atomic writes, the cache folder."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardlight.framework.data import ByteTokenizer, TokenDataset, cache_folder, write_tokens


@pytest.mark.parametrize("text", ["", "def f():\n\treturn 'ä€'\n", "\x00\x7f"])
def test_byte_tokenizer_gives_the_text_back(text):
    tokens = ByteTokenizer().encode(text)
    assert (tokens.dtype, len(tokens)) == (np.uint8, len(text.encode()))
    assert ByteTokenizer().decode(tokens) == text


def test_byte_tokenizer_takes_bytes_and_survives_half_a_character():
    tokens = ByteTokenizer().encode(b"a\xc3")
    assert tokens.tolist() == [97, 195]
    assert ByteTokenizer().decode(torch.tensor(tokens)) == "a\ufffd"


def test_windows_of_nine_tokens(tmp_path):
    assert write_tokens(tmp_path / "t.npy", [np.arange(4), np.arange(4, 9)]) == 9
    dataset = TokenDataset(tmp_path / "t.npy", sequence_length=4)
    assert len(dataset) == 2
    assert [{name: value.tolist() for name, value in dataset[index].items()} for index in range(2)] == [
        {"tokens": [0, 1, 2, 3], "labels": [1, 2, 3, 4]},
        {"tokens": [4, 5, 6, 7], "labels": [5, 6, 7, 8]},
    ]
    assert dataset[0]["tokens"].dtype == dataset[0]["labels"].dtype == torch.int64


@given(count=st.integers(2, 60), sequence_length=st.integers(1, 20))
def test_every_token_but_the_first_is_a_label_exactly_once(count, sequence_length, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "t.npy"
    write_tokens(path, [np.arange(count)])
    if count <= sequence_length:
        with pytest.raises(ValueError, match="too few for one window"):
            TokenDataset(path, sequence_length)
        return
    dataset = TokenDataset(path, sequence_length)
    windows = [dataset[index] for index in range(len(dataset))]
    labels = torch.cat([window["labels"] for window in windows])
    assert labels.tolist() == list(range(1, 1 + len(labels)))
    assert count - 1 - len(labels) < sequence_length  # the rest is shorter than a window
    assert all(torch.equal(window["tokens"] + 1, window["labels"]) for window in windows)


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint8, 255), (np.uint16, 65535), (np.uint32, 2**32 - 1)])
def test_token_files_keep_their_dtype_and_its_largest_token(tmp_path, dtype, largest):
    path = tmp_path / "t.npy"
    write_tokens(path, [np.array([0, largest])], dtype)
    dataset = TokenDataset(path, 1)
    assert dataset.tokens.dtype == dtype
    assert dataset[0]["labels"].item() == largest
    assert path.stat().st_size == 128 + 2 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_that_does_not_fit_is_an_error_and_leaves_no_file(tmp_path, token):
    with pytest.raises(ValueError, match="do not fit into uint8; choose a wider dtype"):
        write_tokens(tmp_path / "t.npy", [np.array([1, 2]), np.array([token])])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "t.npy"
    write_tokens(path, [np.arange(3)])

    def chunks():
        yield np.arange(5)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_tokens(path, chunks())
    assert np.load(path).tolist() == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["t.npy"]


def test_several_writers_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "t.npy"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: write_tokens(path, [np.arange(200)] * 50), range(8)))
    assert len(np.load(path)) == 10_000
    assert [file.name for file in tmp_path.iterdir()] == ["t.npy"]


def test_a_dataset_goes_to_a_loader_worker_as_a_path(tmp_path):
    write_tokens(tmp_path / "t.npy", [np.zeros(100_000)])
    dataset = TokenDataset(tmp_path / "t.npy", 10)
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[7]["tokens"], dataset[7]["tokens"])


def test_windows_outside_and_other_files_are_errors(tmp_path):
    write_tokens(tmp_path / "t.npy", [np.arange(9)])
    dataset = TokenDataset(tmp_path / "t.npy", 4)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"window {index} of 2"):
            dataset[index]
    np.save(tmp_path / "other.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"float64 of shape \(2, 2\) is no token file"):
        TokenDataset(tmp_path / "other.npy", 4)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SHARDLIGHT_CACHE": "{tmp}/own", "XDG_CACHE_HOME": "{tmp}/xdg"}, "own/text"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/shardlight/text"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/shardlight/text"),
        ({}, "home/.cache/shardlight/text"),
    ],
)
def test_cache_folder(tmp_path, monkeypatch, variables, expected):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for name in ("SHARDLIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert cache_folder("text") == tmp_path / expected
    assert (tmp_path / expected).is_dir()
