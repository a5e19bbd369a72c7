"""transformers models are cut into stages with no edit: loss and gradients of the uncut model."""

import pytest
import torch
from hf import batch, build, checkpointed, mixtral
from shardlight.strategies.engine.pipeline.chain import find_chain
from shardlight.strategies.errors import PipelineError
from staged import Staged, check_equal_to_uncut

CHAINS = {"llama": "model.layers", "gpt2": "transformer.h", "qwen3": "model.layers", "bert": "bert.encoder.layer"}
CHAINS |= {"mixtral": "model.layers", "mixtral_list": "model.layers", "bert_classifier": "bert.encoder.layer"}


def step(model, batch):
    return model(**batch).loss


def batches(name, count=2):
    return [batch(name, step, 0) for step in range(count)]


@pytest.mark.parametrize("name", CHAINS)
def test_models_are_cut_with_no_edit(name):
    model = build(name)
    assert find_chain(model).name == CHAINS[name]
    check_equal_to_uncut(model, step, batches(name), 3, "gpipe", tolerance=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    model = checkpointed(build(name), reentrant)
    check_equal_to_uncut(model, step, batches(name), 3, "gpipe")


def test_router_losses_are_refused_by_name():
    torch.manual_seed(0)
    model = mixtral(output_router_logits=True, router_aux_loss_coef=0.1)
    with pytest.raises(PipelineError, match="block 'model.layers.0', which is on stage 0"):
        Staged(model, 2, step).train(batches("mixtral", 1))
    model.config.output_router_logits = False
    check_equal_to_uncut(model, step, batches("mixtral"), 2, tolerance=1e-5)


def test_hidden_states_of_other_stages_are_refused():
    def of_a_layer(model, batch):
        out = model(**batch, output_hidden_states=True)
        return out.loss + out.hidden_states[1].pow(2).mean()

    with pytest.raises(PipelineError, match="depends on block 'model.layers.0'"):
        Staged(build("llama"), 3, of_a_layer).train(batches("llama", 1))
