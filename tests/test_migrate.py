"""`shardlight migrate`: every key of a DeepSpeed or accelerate config gets a line, and the YAML is what it says."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from shardlight import cli
from shardlight.framework.build_optim import learning_rate_factor
from shardlight.framework.config import load
from shardlight.framework.faults import ConfigError
from shardlight.framework.migrate.accelerate_keys import ACCELERATE_KEYS
from shardlight.framework.migrate.convert import migrate
from shardlight.framework.migrate.deepspeed_keys import DEEPSPEED_KEYS
from shardlight.framework.migrate.rules import find
from shardlight.framework.migrate.source import read_source
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from shardlight.framework.schema import TrainerConfig
from shardlight.framework.source import FILL_IN
from shardlight.strategies.options import EngineOptions
from typer.testing import CliRunner

SOURCES = Path(__file__).parent / "migrate_sources"
FILES = sorted(path.name for path in SOURCES.iterdir())
PROJECT = """
import torch
from lightning.pytorch import LightningDataModule
from shardlight.framework import TrainingModule
class Model(TrainingModule):
    def configure_optimizers(self):
        return None
class Plain(TrainingModule):
    pass
class Data(LightningDataModule):
    def __init__(self, batch_size: int = 1):
        super().__init__()
"""
FILLED = {
    "module.class": "migrated_project.Plain", "data.class": "migrated_project.Data", "data.batch_size": 4, "trainer.max_steps": 100000,
    "trainer.devices": 2, "trainer.accumulate_grad_batches": 2, "trainer.precision": "bf16-true",
    "trainer.gradient_clip_val": 1.0, "optimizer.name": "adamw", "optimizer.lr": 1e-4, "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "schedule.warmup_steps": 10,
}  # fmt: skip


class FloatLoader(yaml.SafeLoader):
    """YAML 1.2 numbers, as our reader has them: 3.0e-07 without a sign or dot too."""


FloatLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)

def write(folder: Path, source: dict, name: str = "ds_config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(source, indent=1))
    return path


def lines(folder: Path, source: dict) -> dict:
    return {line.key: line for line in migrate(write(folder, source)).lines}


def config(folder: Path, source: dict) -> dict:
    return yaml.load(migrate(write(folder, source)).text, FloatLoader)


def fault(folder: Path, source: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        migrate(write(folder, source))
    return str(caught.value)


def leaf_names(tree: dict, prefix: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        found += leaf_names(value, path) if isinstance(value, dict) and value else [path]
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_real_config_has_one_line(name):
    made = migrate(SOURCES / name)
    wanted = leaf_names(read_source(SOURCES / name).plain())
    if name == "accelerate_deepspeed_file.yaml":
        wanted += leaf_names(read_source(SOURCES / "ds_inner.json").plain())
    assert [line.key for line in made.lines if not line.key.endswith("(not set)")] == wanted


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "migrated_project.py").write_text(PROJECT)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_migrated_config_passes_the_check_once_it_is_filled_in(name, project):
    made = migrate(SOURCES / name)
    path = project / "config.yaml"
    path.write_text(made.text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    rows = made.text.splitlines()
    still = [fault for fault in caught.value.faults if f"is still {FILL_IN}" in fault.text]
    assert {fault.text.split()[0] for fault in still} == set(made.fill_in)
    assert all(rows[fault.origin.line - 1].endswith(FILL_IN) or f"{FILL_IN} " in rows[fault.origin.line - 1] for fault in still)
    values = yaml.load(made.text, FloatLoader)
    filled = dict(FILLED)
    if "optimizer" not in values:
        filled["module.class"] = "migrated_project.Model"
    if "data.batch_size" in made.fill_in and "global_batch_size" in values["trainer"]:
        filled["data.batch_size"] = 1
    loaded = load(path, [f"{place}={json.dumps(filled[place])}" for place in made.fill_in]).config
    assert loaded.strategy.name == values["strategy"]["name"]


EXPECTED = {
    "ds_stage0_fp16.json": {
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 3e-7, "decay": "all", "betas": [0.8, 0.999], "eps": 1e-8},
        "schedule": {"name": "constant", "warmup_steps": 1000},
        "strategy": {"name": "ddp", "loss_scale": 32768.0, "loss_scale_growth_steps": 500},
        "trainer": {"devices": 4, "max_steps": FILL_IN, "precision": "16-mixed", "global_batch_size": 64,
                    "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "log_every_n_steps": 2000},
    },
    "ds_stage1_bf16.json": {
        "run": {"name": "pretrain", "dir": "logs"},
        "schedule": {"name": "cosine", "warmup_steps": 500, "total_steps": 20000, "min_lr_ratio": 0.1},
        "strategy": {"name": "zero1", "reduce_dtype": "bfloat16"},
    },
    "ds_stage3_nvme.json": {
        "optimizer": {"name": "adamw", "lr": 1e-5, "weight_decay": 0.0},
        "strategy": {"name": "zero3", "master": False, "keep_small": 10000},
    },
    "ds_megatron_onecycle.json": {
        "schedule": {"name": "linear", "warmup_steps": 1000, "total_steps": 2000, "min_lr_ratio": 0.1},
        "strategy": {"name": "ddp", "loss_scale": 128.0, "loss_scale_growth_steps": 0},
    },
    "ds_lora_mics.json": {"strategy": {"name": "zero3", "shard_group": 2}, "optimizer": {"name": "lion", "lr": 1e-4,
                          "betas": [0.95, 0.98], "weight_decay": 0.0}},
    "ds_muon.json": {"optimizer": {"name": "muon", "lr": 0.02, "adamw_lr": 3e-4, "weight_decay": 0.01, "decay": "all",
                     "momentum": 0.95}, "strategy": {"name": "zero2"}},
    "accelerate_multi_gpu.yaml": {"strategy": {"name": "ddp", "compile": "blocks"},
                                  "trainer": {"devices": 4, "max_steps": FILL_IN, "precision": "bf16-mixed"}},
    "accelerate_deepspeed.yaml": {"trainer": {"devices": 8, "num_nodes": 2, "max_steps": FILL_IN, "precision": "bf16-true",
                                  "accumulate_grad_batches": 4, "gradient_clip_val": 1.0}, "strategy": {"name": "zero3"}},
    "accelerate_deepspeed_file.yaml": {"strategy": {"name": "zero3", "keep_small": 0}},
    "accelerate_fsdp1.yaml": {"strategy": {"name": "zero3", "shard_group": 4, "recompute": "blocks",
                              "units": ["LlamaDecoderLayer", "MistralDecoderLayer"]},
                              "trainer": {"devices": 4, "num_nodes": 2, "max_steps": FILL_IN, "precision": "16-mixed"}},
    "accelerate_fsdp2.yaml": {"strategy": {"name": "zero3", "keep_gathered": "backward"},
                              "trainer": {"devices": 2, "max_steps": FILL_IN, "precision": "32-true",
                                          "accumulate_grad_batches": 3, "gradient_clip_val": 0.7}},
    "accelerate_cpu.yaml": {"strategy": {"name": "ddp"}, "trainer": {"accelerator": "cpu", "devices": FILL_IN,
                            "max_steps": FILL_IN, "precision": FILL_IN}},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_real_configs_become_what_they_mean(name):
    made = yaml.load(migrate(SOURCES / name).text, FloatLoader)
    assert {section: made[section] for section in EXPECTED[name]} == EXPECTED[name]


CATALOGUE = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation gradient_clipping
communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients steps_per_print wall_clock_breakdown
memory_breakdown dump_state disable_python_gc log_level sequence_parallel_size data_parallel_size graph_harvesting
seq_parallel_communication_data_type zero_allow_untested_optimizer
optimizer.type optimizer.params.lr optimizer.params.torch_adam optimizer.params.adam_w_mode scheduler.type
scheduler.params.warmup_num_steps
fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis
fp16.consecutive_hysteresis fp16.min_loss_scale fp16.fp16_master_weights_and_grads
bf16.enabled bf16.immediate_grad_update bf16.check_grad_overflow bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
torch_autocast.enabled torch_autocast.dtype torch_autocast.lower_precision_safe_modules
data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules
zero_optimization.stage zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size
zero_optimization.allgather_partitions zero_optimization.reduce_scatter zero_optimization.contiguous_gradients
zero_optimization.overlap_comm zero_optimization.round_robin_gradients zero_optimization.use_multi_rank_bucket_allreduce
zero_optimization.compute_grad_norm zero_optimization.parameter_alignment zero_optimization.ignore_unused_parameters
zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint zero_optimization.zero_allow_untested_optimizer
zero_optimization.gradient_allreduce_op zero_optimization.stage3_max_live_parameters
zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_model_persistence_threshold
zero_optimization.sub_group_size zero_optimization.stage3_module_granularity_threshold
zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential
zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.memory_efficient_linear
zero_optimization.leaf_module.classes zero_optimization.leaf_module.names zero_optimization.leaf_module.name_suffixes
zero_optimization.override_module_apply zero_optimization.enable_sanity_checks zero_optimization.log_trace_cache_warnings
zero_optimization.pipeline_loading_checkpoint zero_optimization.grad_hooks zero_optimization.zero_force_ds_cpu_optimizer
zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.pin_memory
zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.pipeline_read
zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.fast_init
zero_optimization.offload_optimizer.ratio zero_optimization.offload_optimizer.super_offload
zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.offload_optimizer.nvme_path
zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path zero_optimization.offload_param.buffer_count
zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
zero_optimization.offload_param.pin_memory
zero_optimization.zenflow.topk_ratio zero_optimization.zenflow.select_strategy zero_optimization.zenflow.select_interval
zero_optimization.zenflow.update_interval zero_optimization.zenflow.overlap_step zero_optimization.zenflow.offload
zero_optimization.zenflow.auto_ratio zero_optimization.zenflow.full_warm_up_rounds
zero_optimization.zenflow.pt_reserved_cores_perc
zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_weights
zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_nontrainable_weights
zero_optimization.zeropp_loco_param.err_beta zero_optimization.mics_shard_size
zero_optimization.mics_hierarchical_params_gather
aio.block_size aio.queue_depth aio.thread_count aio.intra_op_parallelism aio.single_submit aio.overlap_events aio.use_gds
pipeline.stages pipeline.partition pipeline.seed_layers pipeline.activation_checkpoint_interval pipeline.pipe_partitioned
pipeline.grad_partitioned
tensor_parallel.autotp_size tensor_parallel.preset_model tensor_parallel.tp_overlap_comm
tensor_parallel.partition_config.use_default_specs tensor_parallel.partition_config.layer_specs
tensor_parallel.vocab_parallel_lm_head tensor_parallel.vocab_parallel_ce_backend tensor_parallel.keep_module_on_host
tensor_parallel.dtype expert_parallel.enabled expert_parallel.autoep_size expert_parallel.top_k
use_data_before_expert_parallelism
compile.deepcompile compile.passes compile.free_activation compile.free_activation_threshold compile.offload_activation
compile.offload_opt_states compile.offload_parameters compile.double_buffer compile.symmetric_memory compile.debug_log
compile.keep_int_input_tensors compile.autoep_non_moe
activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints
activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
checkpoint.tag_validation checkpoint.use_node_local_storage checkpoint.parallel_write.pipeline_stage
checkpoint.load_universal checkpoint.writer.type checkpoint.writer.decoupled checkpoint.checkpoint_serialization
datastates_ckpt.host_cache_size nebula.enabled
autotuning.enabled autotuning.fast autotuning.metric autotuning.start_profile_step autotuning.end_profile_step
autotuning.tuner_type autotuning.num_tuning_micro_batch_sizes autotuning.tuner_early_stopping autotuning.tuner_num_trials
autotuning.max_train_batch_size autotuning.mp_size autotuning.arg_mappings autotuning.results_dir autotuning.exps_dir
autotuning.overwrite
flops_profiler.enabled flops_profiler.profile_step flops_profiler.module_depth flops_profiler.top_modules
flops_profiler.detailed flops_profiler.output_file flops_profiler.recompute_fwd_factor
comms_logger.enabled comms_logger.verbose comms_logger.prof_all comms_logger.debug comms_logger.prof_ops
tensorboard.enabled wandb.enabled csv_monitor.enabled comet.enabled timers.throughput.enabled
timers.throughput.synchronized
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics data_efficiency.data_routing.random_ltd
data_efficiency.data_sampling.dynamic_batching curriculum_learning.enabled
hybrid_engine.enabled hybrid_engine.max_out_tokens hybrid_engine.inference_tp_size hybrid_engine.release_inference_cache
hybrid_engine.pin_parameters hybrid_engine.tp_gather_partition_size hybrid_engine.enable_cuda_graph
compression_training.weight_quantization quantize_training.enabled eigenvalue.enabled sparse_attention.mode
progressive_layer_drop.enabled elasticity.enabled amp.enabled
"""


def test_every_key_that_deepspeed_documents_is_known():
    assert [key for key in CATALOGUE.split() if find(DEEPSPEED_KEYS, key) is None] == []


TABLES = {"deepspeed": DEEPSPEED_KEYS, "accelerate": ACCELERATE_KEYS}
VALUES = ["auto", None, True, 0, 2, "x", [1]]


def nested(name: str, value: object) -> dict:
    for part in reversed(name.replace(".*", ".some_key").split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("kind", TABLES)
def test_every_key_of_a_table_has_a_line(kind, tmp_path):
    keys = [key for key, rule in TABLES[kind].items() if rule.what != "fact"]
    base = {"train_batch_size": 1} if kind == "deepspeed" else {"distributed_type": "NO"}
    for number, key in enumerate(keys):
        # A key may be a section too, as autotuning.arg_mappings: both cannot be set at once.
        if any(other.startswith(f"{key}.") for other in keys):
            continue
        place = base
        *above, last = key.replace(".*", f".some_key_{number}").split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = number
    found = lines(tmp_path, base)
    names = leaf_names(base)
    assert len(names) > 50 and [name for name in names if name not in found or found[name].group == "unknown"] == []


@pytest.mark.parametrize("kind", TABLES)
def test_a_key_that_is_settled_with_others_ends_in_one_line_or_a_fault_whatever_its_value(kind, tmp_path):
    """No fact is forgotten, and no value makes an error of Python's own."""
    lost, seen = [], 0
    for key in [key for key, rule in TABLES[kind].items() if rule.what == "fact"]:
        name = key.replace(".*", ".lr" if key.startswith("optimizer") else ".warmup_max_lr")
        for value in VALUES:
            tree = nested(name, value)
            home = "DEEPSPEED" if name.startswith("deepspeed_config") else "FSDP"
            base = {"steps_per_print": 1} if kind == "deepspeed" else {"distributed_type": home}
            for section, of in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
                if name.startswith(f"{section}.params."):
                    tree[section]["type"] = of
            try:
                got = [line for line in migrate(write(tmp_path, base | tree)).lines if line.key == name]
            except ConfigError as error:
                assert re.search(r"ds_config\.json:\d+: ", str(error)), error
                continue
            seen += 1
            lost += [] if len(got) == 1 else [(name, value, got)]
    assert not lost
    assert seen > 90


def test_what_a_table_writes_is_a_key_of_ours():
    homes = {"trainer": TrainerConfig, "strategy": EngineOptions, "optimizer": OptimizerConfig, "schedule": ScheduleConfig}
    for table in TABLES.values():
        for rule in table.values():
            if rule.to:
                section, _, key = rule.to.partition(".")
                assert key in {field.name for field in dataclasses.fields(homes[section])}


@pytest.mark.case("C023")
@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({"gradient_cliping": 1.0, "fp16": {}}, "gradient_cliping", "ignores such a key without a word"),
        ({"gradient_cliping": 1.0, "fp16": {}}, "gradient_cliping", "Did you mean 'gradient_clipping'?"),
        ({"zero_optimisation": {"stage": 3}, "fp16": {}}, "zero_optimisation.stage", "in the unknown section"),
        ({"zero_optimisation": {"stage": 3}, "fp16": {}}, "zero_optimisation.stage", "'zero_optimization'?"),
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "refuse such a key. Did you mean 'stage'?"),
        ({"stage": 3, "fp16": {}}, "stage", "Its place is zero_optimization.stage."),
        ({"aio": {"blok_size": 1}}, "aio.blok_size", "ignores such a key without a word"),
        ({"fp16": True}, "fp16", "a section of keys is expected here"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate", "not one of adamw"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}, "scheduler.params.total_num_steps",
         "not one of WarmupLR"),
        ({"distributed_type": "NO", "mixed_precison": "fp16"}, "mixed_precison", "accelerate refuses such a key."),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_shard": 1}}, "fsdp_config.fsdp_shard", "nothing reads it"),
    ],
)  # fmt: skip
def test_unknown_keys_are_named(source, key, words, tmp_path):
    line = lines(tmp_path, source)[key]
    assert line.group == "unknown" and words in line.text


@pytest.mark.case("C002")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
         ":2: train_batch_size is 100, but train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 = 32: no whole "
         "number of processes"),
        ({"train_batch_size": 15, "train_micro_batch_size_per_gpu": 4}, "train_batch_size is 15, but "
         "train_micro_batch_size_per_gpu 4: no whole number"),
        ({"train_batch_size": 0}, "train_batch_size is 0; it must be at least 1."),
        ({"train_batch_size": "many"}, "train_batch_size must be a whole number"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true. Switch one off."),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; it must be 0, 1, 2 or 3."),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}},
         "total_num_steps is 10, but the warmup has 20 steps"),
        ({"communication_data_type": "int8"}, "communication_data_type is int8; it must be fp16, bf16 or fp32."),
        ({"distributed_type": "MULTI_GPU", "num_processes": 5, "num_machines": 2}, "num_processes is 5, which does not divide "
         "into num_machines 2."),
        ({"distributed_type": "NO", "num_processes": 2}, "distributed_type is NO, but num_processes is 2."),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SOME"}}, "must be one of FULL_SHARD"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "gone.json"}}, "there is no file"),
        ({"num_processes": 2}, "distributed_type is missing"),
    ],
)  # fmt: skip
def test_a_contradiction_is_a_fault_with_its_numbers(source, words, tmp_path):
    text = fault(tmp_path, source)
    assert words in text and re.match(r".*ds_config\.json:\d+: ", text)


@pytest.mark.case("C002")
def test_accelerate_and_its_deepspeed_file_have_to_agree(tmp_path):
    source = {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "fp16"}
    source["deepspeed_config"] = {"deepspeed_config_file": "inner.json", "gradient_accumulation_steps": 4}
    write(tmp_path, {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}, "inner.json")
    text = fault(tmp_path, source)
    assert "inner.json:2: gradient_accumulation_steps is 2, but deepspeed_config.gradient_accumulation_steps is 4" in text
    assert "bf16.enabled is true, but mixed_precision is fp16" in text
    inner = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    write(tmp_path, inner, "inner.json")
    terms = "train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 x num_processes 4 = 128"
    assert f"train_batch_size is 64, but {terms.replace('gradient', 'deepspeed_config.gradient')}" in fault(tmp_path, source)
    write(tmp_path, inner | {"train_batch_size": 128}, "inner.json")
    assert config(tmp_path, source)["trainer"]["global_batch_size"] == 128


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (8, 4, 64, 2)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (FILL_IN, 4, 64, None)),
        ({"train_batch_size": 64}, (FILL_IN, FILL_IN, 64, None)),
        ({"train_micro_batch_size_per_gpu": 4}, (FILL_IN, 4, None, None)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
         (FILL_IN, FILL_IN, None, FILL_IN)),
    ],
)  # fmt: skip
def test_batches_are_what_follows_and_never_guessed(given, wanted, tmp_path):
    made = config(tmp_path, given)
    trainer = made["trainer"]
    got = (trainer["devices"], made["data"]["batch_size"], trainer.get("global_batch_size"))
    assert (*got, trainer.get("accumulate_grad_batches")) == wanted


def test_processes_give_the_batch_of_a_process(tmp_path):
    source = {"distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 2}
    source["deepspeed_config"] = {"deepspeed_config_file": "inner.json"}
    write(tmp_path, {"train_batch_size": 64, "gradient_accumulation_steps": 2}, "inner.json")
    made = config(tmp_path, source)
    assert made["data"]["batch_size"] == 8 and made["trainer"]["devices"] == made["trainer"]["num_nodes"] == 2
    write(tmp_path, {"train_batch_size": 64}, "inner.json")
    assert config(tmp_path, source)["data"]["batch_size"] == 16, "one micro-batch, as in DeepSpeed"


def test_auto_names_where_the_value_comes_from_and_is_left(tmp_path):
    text = migrate(SOURCES / "ds_stage2_auto.json").text
    for argument in ("learning_rate", "adam_beta1", "adam_epsilon", "weight_decay", "max_grad_norm", "warmup_steps",
                     "per_device_train_batch_size", "gradient_accumulation_steps"):  # fmt: skip
        assert f"TrainingArguments.{argument}" in " ".join(text.replace("#", "").split()), argument


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("Adam", {}, {"name": "adamw", "lr": 0.001, "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False}, {"name": "adam", "lr": 0.001, "weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, {"name": "adamw", "lr": 0.001, "weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, {"name": "adamw", "lr": 0.001, "weight_decay": 0.01, "decay": "all"}),
        ("OneBitAdam", {"freeze_step": 9}, {"name": "adamw", "lr": 0.001, "weight_decay": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True},
         {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", {}, {"name": "adagrad", "lr": 0.01}),
        ("MuAdam", {"lr": 1.0}, {"name": FILL_IN, "lr": 1.0}),
        ("Shampoo", {}, {"name": FILL_IN, "lr": 0.001}),
    ],
)  # fmt: skip
def test_an_optimizer_is_the_one_that_ran_with_its_own_defaults(kind, params, wanted, tmp_path):
    assert config(tmp_path, {"optimizer": {"type": kind, "params": params}})["optimizer"] == wanted


@pytest.mark.parametrize(
    ("source", "precision", "options"),
    [
        ({"bf16": {"enabled": True}}, "bf16-true", {}),
        ({"bfloat16": {"enabled": True}}, "bf16-true", {}),
        ({"fp16": {"enabled": True}}, "16-mixed", {"loss_scale_growth_steps": 1000}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, "16-mixed", {"loss_scale_growth_steps": 1000}),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "16-mixed", {"loss_scale_growth_steps": 1000}),
        ({"fp16": {"enabled": False}}, "32-true", {}),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}, "16-mixed", {}),
        ({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}, "bf16-true", {}),
    ],
)  # fmt: skip
def test_precision_is_what_the_source_computed_in(source, precision, options, tmp_path):
    made = config(tmp_path, source)
    assert made["trainer"]["precision"] == precision
    assert {key: value for key, value in made["strategy"].items() if key != "name"} == options


def deepspeed_rate(kind: str, step: int, warmup: int, total: int, low: float) -> float:
    """DeepSpeed's linear warmup and what follows, as a share of the highest rate, at optimizer step `step` from 0."""
    last = step - 1
    if last < warmup:
        return max(last, 0) / warmup
    if kind == "WarmupLR":
        return 1.0
    if kind == "WarmupDecayLR":
        return low + (1 - low) * max(0.0, (total - last) / (total - warmup))
    return low + (1 - low) * (1 + math.cos(math.pi * min(1.0, (last - warmup + 1) / (total - warmup)))) / 2


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_schedule_is_the_same_function(kind, tmp_path):
    warmup, total, low = 100, 1000, 0.1
    params = {"warmup_num_steps": warmup, "warmup_type": "linear"}
    params |= {} if kind == "WarmupLR" else {"total_num_steps": total}
    params |= {"cos_min_ratio": low} if kind == "WarmupCosineLR" else {"warmup_max_lr": 0.01}
    params |= {"warmup_min_lr": low * 0.01} if kind == "WarmupDecayLR" else {}
    source = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "scheduler": {"type": kind, "params": params}}
    made = config(tmp_path, source)
    assert made["optimizer"]["lr"] == 0.01
    ours = ScheduleConfig(**made["schedule"])
    worst = [abs(learning_rate_factor(ours, total, step) - deepspeed_rate(kind, step, warmup, total, low))
             for step in range(total)]  # fmt: skip
    after = slice(warmup + 1, total)
    assert max(worst[:warmup]) <= 2 / warmup
    assert max(worst[after]) <= {"WarmupLR": 0, "WarmupDecayLR": 1.001 / (total - warmup), "WarmupCosineLR": 1e-12}[kind]


def test_a_schedule_that_is_not_here_is_said_and_not_written(tmp_path):
    for kind in ("LRRangeTest", "StepLR"):
        source = {"scheduler": {"type": kind, "params": {"lr_range_test_min_lr": 1e-3}}}
        assert "schedule" not in config(tmp_path, source)
        assert lines(tmp_path, source)["scheduler.type"].group == "none"


def test_another_default_is_said_where_the_source_leaves_it_open(tmp_path):
    found = lines(tmp_path, {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}})
    assert "1.0 since mid-2026" in found["gradient_clipping (not set)"].text
    assert "1e5" in found["zero_optimization.stage3_param_persistence_threshold (not set)"].text
    assert "1000" in found["fp16.loss_scale_window (not set)"].text
    assert {line.group for key, line in found.items() if key.endswith("(not set)")} == {"differs"}


TEXTS = st.text('ab"\\\\\n\t/#*é😀{}[],: ', max_size=6)
JSON = st.recursive(
    st.sampled_from([None, True, False, 0, -1, 1e-5, 2.5e9, 10**12]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(value=st.dictionaries(TEXTS, JSON, max_size=4), indent=st.sampled_from([None, 2, "\t"]))
def test_json_reads_as_json(value, indent, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert read_source(path).plain() == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"a": 1\n"b": 2}', ":3: not valid JSON: a comma is missing before this."),
        ('{\n"a": }', ":2: not valid JSON: expecting value."),
        ('{\n\n"a": 1, "a": 2}', ':3: "a" is already set at'),
        ("{\na: 1}", ":2: not valid JSON: a key must be in double quotes."),
        ('{"a" 1}', ':1: not valid JSON: a colon is missing after "a".'),
        ('{"a": 1', "not valid JSON: the file ends before this."),
        ('{"a": 1}\n}', ":2: not valid JSON: there is something behind"),
        ('{"a": /* 1}', "the comment /* has no end"),
        ('{"a": "x\n"}', ":1: not valid JSON: "),
        ("[1]", ":1: the top level must be a mapping"),
        ("", ":1: not valid JSON"),
        ('{"a":' + "[" * 60 + "]" * 60 + "}", "more than 50 levels"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON: "),
        ('{"learning": 1, "rate": 2}', ":1: neither a DeepSpeed config"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_fault_with_its_line(text, words, tmp_path):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        migrate(tmp_path / "ds.json")
    assert words in str(caught.value) and str(caught.value).startswith(str(tmp_path / "ds.json"))


def test_broken_yaml_is_a_fault_with_its_line(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: NO\nmixed_precision: [\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:\d+: not valid YAML"):
        migrate(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate(tmp_path / "none.json")


def test_no_text_of_the_source_gets_out_of_a_comment(tmp_path):
    source = {"tensorboard": {"enabled": True, "output_path": 'x"\nseed: 1'}, "bad\x1b[31m\nrun": 1}
    (tmp_path / "ds\nseed: 3.json").write_text(json.dumps(source))
    made = migrate(tmp_path / "ds\nseed: 3.json")
    assert set(yaml.safe_load(made.text)) == {"run", "module", "data", "strategy", "trainer"}
    assert yaml.safe_load(made.text)["run"]["dir"] == 'x"\nseed: 1'
    ran = run(["migrate", str(tmp_path / "ds\nseed: 3.json"), "--out", str(tmp_path / "c.yaml")])
    assert "\x1b" not in ran.output and "\\x1b[31m\\x0arun" in ran.output


def run(arguments: list[str]):
    return CliRunner().invoke(cli.app, arguments)


def test_the_command_writes_the_config_and_the_report(tmp_path):
    out, report = tmp_path / "new" / "config.yaml", tmp_path / "report.json"
    ran = run(["migrate", str(SOURCES / "ds_lora_mics.json"), "--out", str(out), "--json", str(report)])
    assert ran.exit_code == 0, ran.output
    assert out.read_text() == migrate(SOURCES / "ds_lora_mics.json").text
    (tmp_path / "plain").touch()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert "Unknown: not a key of the source's own tool (1)\n  ds_lora_mics.json:15  gradient_cliping = 1.0  " in ran.output
    assert f"{out}: written. To fill in: module.class, data.class, trainer.max_steps." in ran.output
    data = json.loads(report.read_text())
    assert sum(data["counts"].values()) == len(data["lines"]) and data["kind"] == "deepspeed"
    assert data["fill_in"] == ["module.class", "data.class", "trainer.max_steps"]
    row = next(row for row in data["lines"] if row["key"] == "zero_optimization.mics_shard_size")
    assert (row["group"], row["to"], row["value"]) == ("maps", "strategy.shard_group: 2", 2)


def test_nothing_is_written_over_unless_it_is_asked_for(tmp_path):
    source = write(tmp_path, {"bf16": {"enabled": True}})
    out = tmp_path / "config.yaml"
    out.write_text("mine\n")
    ran = run(["migrate", str(source), "--out", str(out)])
    assert ran.exit_code == 2 and "is there already" in ran.output and out.read_text() == "mine\n"
    assert run(["migrate", str(source), "--out", str(out), "--force"]).exit_code == 0
    assert "bf16-true" in out.read_text()
    before = source.read_text()
    ran = run(["migrate", str(source), "--out", str(source), "--force"])
    assert ran.exit_code == 2 and "is the source" in ran.output and source.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "ds_config.json"]


def test_a_fault_writes_nothing_and_shows_no_traceback(tmp_path):
    source = write(tmp_path, {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})
    ran = run(["migrate", str(source), "--out", str(tmp_path / "c.yaml")])
    assert ran.exit_code == 2 and "Traceback" not in ran.output and not (tmp_path / "c.yaml").exists()


