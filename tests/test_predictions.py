"""Predictions of several ranks joined in the order of the dataset."""

import pytest
import torch
from shardlight.framework.predictions import PredictionError, joined, merged


def test_rows_come_in_dataset_order_and_once():
    # Three ranks, seven samples dealt in turn; the last rank repeats sample 0 to have as many as the others.
    parts = []
    for rank, indices in enumerate(([[0, 3], [6]], [[1, 4]], [[2, 5], [0]])):
        batches = [
            {"a": torch.tensor(rows) * 1.0, "b": torch.tensor([[row, rank] for row in rows])} for rows in indices
        ]
        parts.append(joined(batches, indices))
    made = merged(parts)
    assert made["a"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert made["b"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 0], [4, 1], [5, 2], [6, 0]]
    assert set(made) == {"a", "b"}


def test_ranks_without_samples_are_left_out():
    empty = joined([], [])
    assert merged([empty, joined([torch.tensor([5.0])], [[0]])])["predictions"].tolist() == [5.0]
    assert merged([empty]) == {}


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([1, 2], "predict_step returned predictions as list for 2 samples."),
        (torch.tensor(1.0), "predict_step returned predictions as shape () for 2 samples."),
        ({"a": torch.ones(3, 2)}, "predict_step returned a as shape (3, 2) for 2 samples."),
    ],
)
def test_what_has_no_row_per_sample_is_refused(batch, text):
    with pytest.raises(PredictionError) as caught:
        joined([batch], [[0, 1]])
    assert str(caught.value) == f"{text} Return a tensor, or a dict of tensors, with one row per sample."


def test_batches_of_different_shapes_are_refused():
    with pytest.raises(PredictionError, match=r"do not fit together: .*\. Pad them to one shape\."):
        joined([torch.ones(1, 2), torch.ones(1, 3)], [[0], [1]])
