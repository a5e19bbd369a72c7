"""Optimizer and schedule from the config: decay groups, exact learning rates, the values of one step."""

import logging

import pytest
import torch
from lightning.pytorch import LightningModule
from shardlight.framework.build_optim import build_optimizer, build_schedule, decay_groups, learning_rate_factor
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from shardlight.ops.lamb import Lamb
from shardlight.ops.lion import Lion
from shardlight.ops.muon_adamw import MuonAdamW
from shardlight.strategies.errors import ShardlightError
from torch import nn


class RMSNorm2(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class Small(LightningModule):
    """One of everything that decay groups tell apart; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = RMSNorm2()
        self.layer_norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def adamw(**options):
    return OptimizerConfig(**{"name": "adamw", "lr": 0.1, **options})


def test_norms_biases_and_embeddings_are_not_decayed_by_default():
    decay, no_decay = decay_groups(Small(), adamw())
    assert set(decay) == {"attention.in_proj_weight", "attention.out_proj.weight", "scale"}
    assert set(no_decay) == {
        "embedding.weight",
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "norm.gain",
        "layer_norm.weight",
        "layer_norm.bias",
        "head.bias",
    }


def test_a_head_tied_to_an_embedding_is_exempt_whichever_comes_first():
    module = nn.Module()
    module.head = nn.Linear(4, 5, bias=False)
    module.embedding = nn.Embedding(5, 4)
    module.embedding.weight = module.head.weight
    decay, no_decay = decay_groups(module, adamw())
    assert not decay
    assert list(no_decay) == ["head.weight"]


def test_every_trainable_parameter_is_in_the_optimizer_exactly_once():
    module = Small()
    module.again = module.attention  # a module under two names
    optimizer = build_optimizer(module, adamw())
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert sorted(ids) == sorted(id(param) for param in module.parameters() if param.requires_grad)
    assert [(group["name"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ("decay", 0.01),
        ("no_decay", 0.0),
    ]


def test_decay_all_and_patterns_override_the_default():
    decay, no_decay = decay_groups(Small(), adamw(decay="all", no_decay=("scale", "*.bias")))
    assert set(no_decay) == {"scale", "attention.out_proj.bias", "layer_norm.bias", "head.bias"}
    assert "embedding.weight" in decay and "norm.gain" in decay


def test_a_pattern_matches_any_name_of_a_tied_parameter():
    _, no_decay = decay_groups(Small(), adamw(decay="all", no_decay=("head.weight",)))
    assert list(no_decay) == ["embedding.weight"]


def test_a_pattern_without_a_match_is_an_error_that_shows_names():
    with pytest.raises(ShardlightError, match=r"no_decay: \['layer\.\*'\] match no parameter; names look like: scale"):
        decay_groups(Small(), adamw(no_decay=("layer.*", "head.*")))


def test_nothing_to_train_is_an_error():
    with pytest.raises(ShardlightError, match="Linear has no parameter with requires_grad=True"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), adamw())


def test_the_log_says_which_implementation_runs_and_what_is_decayed(caplog):
    with caplog.at_level(logging.INFO):
        build_optimizer(Small(), adamw(lr=3e-4, weight_decay=0.1))
    (line,) = [record.getMessage() for record in caplog.records if "optimizer:" in record.getMessage()]
    assert line == (
        "optimizer: torch.optim.AdamW, lr 0.0003; weight decay 0.1 on 68 parameters in 3 tensors, "
        "none on 53 parameters in 7 tensors (norms, biases, embeddings); 2 frozen tensors left out"
    )


@pytest.mark.case("C029")
@pytest.mark.parametrize(
    ("name", "weight_decay", "expected"),
    [
        ("adamw", 0.1, 0.89),  # decoupled: 1 - 0.1 * 0.1 * 1 - 0.1
        ("adam", 0.1, 0.90),  # L2: the gradient's size does not matter to the first step
        ("sgd", 0.1, 0.89),  # L2: 1 - 0.1 * (1 + 0.1)
        ("adamw", None, 1 - 0.1 * 0.01 - 0.1),
        ("adam", None, 0.90),
        ("sgd", None, 0.90),
    ],
)
def test_one_step_from_one_with_gradient_one(name, weight_decay, expected):
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = build_optimizer(module, OptimizerConfig(name=name, lr=0.1, weight_decay=weight_decay))
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    assert module.weight.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.case("C029")
@pytest.mark.parametrize(("name", "expected"), [("adamw", 0.01), ("adam", 0.0), ("sgd", 0.0)])
def test_unset_weight_decay_is_that_of_torch(name, expected):
    config = OptimizerConfig(name=name, lr=0.1)
    assert config.effective_weight_decay == expected
    torch_class = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    assert torch_class([nn.Parameter(torch.ones(1))], lr=0.1).defaults["weight_decay"] == expected
    assert type(build_optimizer(nn.Linear(1, 1), config)) is torch_class


def test_options_reach_the_optimizer():
    group = build_optimizer(nn.Linear(1, 1), adamw(betas=(0.8, 0.9), eps=1e-6)).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    sgd = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, nesterov=True)
    group = build_optimizer(nn.Linear(1, 1), sgd).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.9, True)


def test_all_faults_of_an_optimizer_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        OptimizerConfig(name="tiger", lr=-1.0, eps=float("nan"), betas=(0.9, 1.0), momentum=-0.1, weight_decay=-1.0)
    message = str(error.value)
    for part in ("name is 'tiger'; choose one of adamw, adam, sgd", "lr is -1.0", "eps is nan", "betas", "momentum"):
        assert part in message
    with pytest.raises(ValueError, match="nesterov needs momentum"):
        OptimizerConfig(name="sgd", lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="decay is 'none'; choose one of weights, all"):
        OptimizerConfig(name="sgd", lr=0.1, decay="none")


CLASSES = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
    "lamb": Lamb,
    "lion": Lion,
}


@pytest.mark.parametrize("name", CLASSES)
def test_unset_options_are_the_defaults_of_the_class(name):
    config = OptimizerConfig(name=name, lr=0.1)
    defaults = CLASSES[name]([nn.Parameter(torch.ones(1))], lr=0.1).defaults
    (group,) = build_optimizer(nn.Linear(3, 2, bias=False), config).param_groups
    assert {k: group[k] for k in defaults} == defaults
    assert config.options.keys() <= defaults.keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adagrad", {"eps": 1e-3, "lr_decay": 0.1}),
        ("rmsprop", {"alpha": 0.5, "momentum": 0.9, "centered": True, "eps": 1e-3}),
        ("adafactor", {"beta2_decay": -0.5, "weight_decay": 0.2}),
        ("lamb", {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.0}),
        ("lion", {"betas": (0.5, 0.6), "weight_decay": 0.2}),
    ],
)
def test_options_of_each_reach_it(name, options):
    optimizer = build_optimizer(nn.Linear(2, 2, bias=False), OptimizerConfig(name=name, lr=0.1, **options))
    assert type(optimizer) is CLASSES[name]
    assert {k: optimizer.param_groups[0][k] for k in options} == options


def test_options_of_another_optimizer_are_faults():
    for name, options, text in (
        ("adamw", {"momentum": 0.0}, "momentum is for sgd, rmsprop, muon, and adamw has weight_decay, betas, eps"),
        ("sgd", {"adamw_lr": 1.0}, "adamw_lr is for muon, and sgd has weight_decay, momentum, nesterov"),
        ("lamb", {"alpha": 0.9}, "alpha is for rmsprop, and lamb has"),
        ("lion", {"eps": 0.1}, "and lion has weight_decay, betas"),
        ("muon", {"lr_decay": 0.9, "adamw_lr": 1.0}, "lr_decay is for adagrad, and muon has"),
        ("muon", {}, "adamw_lr is missing; set the learning rate of embeddings, norms, biases and head, such as 3e-4, or"),
        ("muon", {"adamw_lr": 1.0, "ns_steps": 0}, "ns_steps is 0; it must be from 1 to 99"),
        ("muon", {"adamw_lr": 1.0, "adjust_lr": "x"}, "adjust_lr is 'x'; it must be original or match_rms_adamw"),
        ("muon", {"adamw_lr": 1.0, "momentum": 0.0, "nesterov": True}, "nesterov needs momentum"),
        ("adafactor", {"beta2_decay": 0.5}, "beta2_decay is 0.5; it must be at most 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            OptimizerConfig(name=name, lr=0.1, **options)
        assert text in str(error.value)


def test_lamb_scales_what_it_decays():
    def adapted(**options):
        config = OptimizerConfig(name="lamb", lr=0.1, **options)
        return {g["name"]: g["adapt"] for g in build_optimizer(Small(), config).param_groups}

    assert adapted() == {"decay": True, "no_decay": False}
    assert adapted(decay="all") == {"decay": True}


def muon(**options):
    return OptimizerConfig(**{"name": "muon", "lr": 0.02, "adamw_lr": 0.003, **options})


def names_by_group(module, config):
    names = {id(p): n for n, p in module.named_parameters()}
    optimizer = build_optimizer(module, config)
    assert type(optimizer) is MuonAdamW
    return {g["name"]: ({names[id(p)] for p in g["params"]}, g) for g in optimizer.param_groups}


def test_muon_trains_hidden_matrices_and_adamw_the_rest(caplog):
    module = Small()
    module.lm_head = nn.Linear(4, 5)
    with caplog.at_level(logging.INFO):
        groups = names_by_group(module, muon())
    found = {name: names for name, (names, _) in groups.items()}
    assert found == {
        "muon_decay": {"attention.in_proj_weight", "attention.out_proj.weight"},
        "adamw_decay": {"scale", "lm_head.weight"},
        "adamw_no_decay": {
            "embedding.weight", "attention.in_proj_bias", "attention.out_proj.bias", "norm.gain", "layer_norm.weight",
            "layer_norm.bias", "head.bias", "lm_head.bias",
        },
    }  # fmt: skip
    options = {k: groups["muon_decay"][1][k] for k in ("lr", "weight_decay", "momentum", "nesterov", "ns_steps")}
    assert options == {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
    assert [groups[n][1]["weight_decay"] for n in ("adamw_decay", "adamw_no_decay")] == [0.01, 0.0]
    assert {groups[n][1]["lr"] for n in ("adamw_decay", "adamw_no_decay")} == {0.003}
    (line,) = [record.getMessage() for record in caplog.records if "optimizer:" in record.getMessage()]
    assert line == (
        "optimizer: torch.optim.Muon, lr 0.02, for 64 parameters in 2 tensors, torch.optim.AdamW, lr 0.003, for 82 "
        "parameters in 10 tensors; weight decay 0.1 (AdamW 0.01) on 88 parameters in 4 tensors, none on 58 parameters "
        "in 8 tensors (norms, biases, embeddings); 2 frozen tensors left out"
    )


def test_muon_takes_what_the_config_says():
    chosen = muon(adamw_for=("*out_proj*",), weight_decay=0.3, adamw_lr=None, adjust_lr="match_rms_adamw", decay="all")
    groups = names_by_group(Small(), chosen)
    assert groups["muon_decay"][0] == {"attention.in_proj_weight"}
    assert "attention.out_proj.weight" in groups["adamw_decay"][0]
    assert {g["weight_decay"] for _, g in groups.values()} == {0.3} and {g["lr"] for _, g in groups.values()} == {0.02}
    assert groups["muon_decay"][1]["adjust_lr_fn"] == "match_rms_adamw"
    undecayed = names_by_group(Small(), muon(no_decay=("attention.in_proj_weight",)))
    assert undecayed["muon_no_decay"][0] == {"attention.in_proj_weight"}
    assert undecayed["muon_no_decay"][1]["weight_decay"] == 0
    with pytest.raises(ShardlightError, match=r"adamw_for: \['head2\*'\] match no parameter; names look like: scale"):
        build_optimizer(Small(), muon(adamw_for=("head2*",)))
    with pytest.raises(ShardlightError, match="Embedding has no hidden matrix for muon to train"):
        build_optimizer(nn.Embedding(3, 4), muon())


# The learning rate over optimizer steps 0, 1, ... of a run of 6, warmup 2, lowest 0.2; step 6 and later stay.
FACTORS = {
    "constant": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1],
    "linear": [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2, 0.2],
    "cosine": [1 / 3, 2 / 3, 1, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5), 0.2, 0.2],
}


@pytest.mark.parametrize("name", FACTORS)
def test_schedule_has_exact_values(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = build_schedule(optimizer, ScheduleConfig(name=name, warmup_steps=2, min_lr_ratio=0.2), total_steps=6)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5 * factor for factor in FACTORS[name]], rel=1e-12)


def test_total_steps_of_the_config_win_over_those_of_the_training():
    config = ScheduleConfig(name="linear", total_steps=4)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = build_schedule(optimizer, config, total_steps=1000)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.75


def test_without_warmup_the_first_step_has_the_full_rate():
    for name in FACTORS:
        assert learning_rate_factor(ScheduleConfig(name=name), 10, 0) == 1.0


def test_a_resumed_schedule_follows_the_config_it_is_given():
    def schedule(total_steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return build_schedule(optimizer, ScheduleConfig(name="linear"), total_steps), optimizer

    first, optimizer = schedule(4)
    optimizer.step()
    first.step()
    longer, optimizer = schedule(10)
    longer.load_state_dict(first.state_dict())
    optimizer.step()
    longer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("config", "total_steps", "message"),
    [
        ({"name": "cosine"}, float("inf"), "cosine needs an end.*Set schedule.total_steps or trainer.max_steps"),
        ({"name": "linear", "warmup_steps": 5}, 5, "warmup_steps 5 does not fit into 5 optimizer steps"),
    ],
)
def test_a_schedule_without_room_is_an_error(config, total_steps, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ShardlightError, match=message):
        build_schedule(optimizer, ScheduleConfig(**config), total_steps)


def test_constant_needs_no_end():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    build_schedule(optimizer, ScheduleConfig(name="constant", warmup_steps=1), float("inf"))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_all_faults_of_a_schedule_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        ScheduleConfig(name="step", warmup_steps=-1, total_steps=-2, min_lr_ratio=2.0)
    for part in ("constant, linear, cosine", "warmup_steps is -1", "total_steps is -2", "min_lr_ratio is 2.0"):
        assert part in str(error.value)
