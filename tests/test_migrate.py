"""`shardlight migrate`: every key of a DeepSpeed or accelerate config gets a line, and the YAML is what it says."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from migrating import FILES, SOURCES, FloatLoader, config, leaf_names, lines, write
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

PROJECT = """
import torch
from lightning.pytorch import LightningDataModule
from shardlight.framework import TrainingModule
class Model(TrainingModule):
    def training_step(self, batch): pass
    def configure_optimizers(self):
        return None
class LlamaDecoderLayer(torch.nn.Module): pass
class MistralDecoderLayer(torch.nn.Module): pass
class Plain(TrainingModule):
    def training_step(self, batch): pass
class Data(LightningDataModule):
    def __init__(self, batch_size: int = 1):
        super().__init__()
    def train_dataloader(self): pass
"""
FILLED = {
    "module.class": "migrated_project.Plain", "data.class": "migrated_project.Data", "data.batch_size": 4, "trainer.max_steps": 100000,
    "trainer.devices": 2, "trainer.accumulate_grad_batches": 2, "trainer.precision": "bf16-true",
    "trainer.gradient_clip_val": 1.0, "optimizer.name": "adamw", "optimizer.lr": 1e-4, "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "schedule.warmup_steps": 10,
}  # fmt: skip


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
    assert all(
        rows[fault.origin.line - 1].endswith(FILL_IN) or f"{FILL_IN} " in rows[fault.origin.line - 1] for fault in still
    )
    values = yaml.load(made.text, FloatLoader)
    filled = dict(FILLED)
    if "optimizer" not in values:
        filled["module.class"] = "migrated_project.Model"
    if "data.batch_size" in made.fill_in and "global_batch_size" in values["trainer"]:
        filled["data.batch_size"] = (
            values["trainer"]["global_batch_size"] // values["trainer"]["accumulate_grad_batches"] // 2
        )
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
VALUES = ["auto", None, True, 0, "x", [1]]


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
    assert seen > 80


def test_what_a_table_writes_is_a_key_of_ours():
    homes = {
        "trainer": TrainerConfig,
        "strategy": EngineOptions,
        "optimizer": OptimizerConfig,
        "schedule": ScheduleConfig,
    }
    for table in TABLES.values():
        for rule in table.values():
            if rule.to:
                section, _, key = rule.to.partition(".")
                assert key in {field.name for field in dataclasses.fields(homes[section])}


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
    assert (
        max(worst[after]) <= {"WarmupLR": 0, "WarmupDecayLR": 1.001 / (total - warmup), "WarmupCosineLR": 1e-12}[kind]
    )


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
