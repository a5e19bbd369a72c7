"""transformers models built deferred, grown and loaded, equal the ordinary ones to the last bit."""

import warnings

import pytest
import torch
from hf import MODELS
from shardlight.strategies import deferred_init, load_weights, materialise
from shardlight.strategies.engine.deferred.tensors import is_deferred
from test_deferred import state


def make(name, deferred, grow):
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not deferred:
            return grow(MODELS[name]())
        with deferred_init():
            return grow(MODELS[name]())


def grown(model):
    model.resize_token_embeddings(70, mean_resizing=True)  # new rows by the old ones' mean and covariance
    return model


@pytest.mark.case("C067")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert", "mixtral", "t5"])
def test_transformers_models_are_built_deferred(name):
    for grow in (lambda m: m, grown) if name in ("llama", "gpt2") else (lambda m: m,):
        want, got = make(name, False, grow), make(name, True, grow)
        assert all(is_deferred(p) for p in got.parameters())
        materialise(got)
        for key, tensor in state(want).items():
            assert torch.equal(state(got)[key], tensor), key


@pytest.mark.case("C068")
def test_a_saved_transformers_model_is_loaded_with_its_tied_weights(tmp_path):
    want = make("qwen3", False, lambda m: m)
    want.save_pretrained(tmp_path)
    with deferred_init():
        got = MODELS["qwen3"]()
    assert not load_weights(got, tmp_path).missing
    materialise(got)
    for key, tensor in state(want).items():
        assert torch.equal(state(got)[key], tensor), key
