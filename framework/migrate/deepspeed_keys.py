"""The table for a DeepSpeed config: every key that 0.19 has, and those that versions before it had."""

from shardlight.framework.migrate.rules import Rule, differs, fact, none, section
from shardlight.framework.migrate.zero_keys import ZERO_KEYS

_FLOPS = none(
    "no counter of operations: the log has tokens/s and times; torch.utils.flop_counter counts those of one forward"
)
_TIMERS = none(
    "not needed: the log has step times and summary.json the whole; Trainer(profiler='pytorch') shows gathers, "
    "reductions "
    "and steps by unit"
)
_LOGGER = none(
    "a config's run logs to TensorBoard; another logger is given to Lightning's Trainer in Python, which takes our "
    "strategies as they are"
)
_RECOMPUTE = differs(
    "in DeepSpeed these keys act only where the model calls deepspeed.checkpointing itself. Here strategy.recompute: "
    "blocks does it for the model's blocks, on the device, one copy a rank. Check whether yours did, then set it"
)
_CHECKPOINT = none(
    "not needed: every rank writes its part, the manifest last; a checkpoint opens under any strategy and number "
    "of ranks"
)
_DATA = none(
    "no sampling by difficulty and no dropping of tokens: order, lengths and batches are your LightningDataModule's"
)
_SPARSE = none("no sparse attention: that is the model's own, torch's flex_attention say")
_AIO = none("the disk engine of strategy infinity, and checkpoints, need no tuning")
_PIPELINE = none("no pipeline of stages in this version: zero3 shards the layers instead")
_TENSOR = none("no tensor parallelism in this version: zero3 shards the weights instead")
_EXPERTS = none("no expert parallelism in this version: experts are sharded by zero3 like all weights")
_COMPRESSION = none("no pruning or quantization while training; do that to the exported weights")
_ELASTIC = none(
    "not needed: trainer.global_batch_size keeps the batch, and a checkpoint goes on with any number of ranks that "
    "divides "
    "it"
)
_COMMS = none(
    "no log of collectives: `shardlight bench collectives` measures them, Trainer(profiler='pytorch') shows them"
)
_TUNING = none("no search for settings: `shardlight bench zero` compares strategies side by side")
_COMPILE = differs(
    "strategy.compile: blocks is torch.compile of each of the model's blocks. It plans no exchanges; try it and compare"
)
_HYBRID = none("no engine for generation: generate under `strategy.gathered(module)`, or from exported weights")
_REMOVED = none("not here; DeepSpeed 0.19 has removed it too")
_FREE = none("not needed: a checkpoint has no third-party writer")

DEEPSPEED_KEYS: dict[str, Rule] = {
    # Batches
    "train_batch_size": fact("whole_batch"),
    "train_micro_batch_size_per_gpu": fact("micro_batch"),
    "gradient_accumulation_steps": fact("accumulation"),
    "managed_gradient_accumulation": none(
        "not needed: the trainer closes a window; take manual optimization for your own"
    ),
    "dataloader_drop_last": none("not needed here: drop_last is an argument of your DataLoader"),
    # Optimizer and schedule: optimizers.py, schedules.py
    "optimizer.type": fact("optimizer"),
    "optimizer.params": fact("optimizer"),
    "optimizer.params.*": fact("optimizer"),
    "optimizer.legacy_fusion": none("not needed: a detail of DeepSpeed's own optimizers"),
    "scheduler.type": fact("scheduler"),
    "scheduler.params": fact("scheduler"),
    "scheduler.params.*": fact("scheduler"),
    # Gradients
    "gradient_clipping": fact("clipping"),
    "communication_data_type": fact("reduce_dtype"),
    "fp32_allreduce": fact("fp32_allreduce"),
    **section(
        "",
        none("not needed: gradients are summed in fp32 whatever they travel in"),
        "prescale_gradients gradient_predivide_factor",
    ),
    "sparse_gradients": none("gradients are exchanged dense: leave Embedding(sparse=False)"),
    "gradient_allreduce_op": fact("gradient_op"),
    "disable_allgather": none("not needed: a detail of DeepSpeed's own engine"),
    # Precision
    "fp16.enabled": fact("fp16"),
    "fp16.loss_scale": fact("loss_scale"),
    "fp16.initial_scale_power": fact("scale_power"),
    "fp16.loss_scale_window": fact("scale_window"),
    **section(
        "fp16",
        differs("here each inf or NaN halves the scale at once, so that it finds its value a little sooner"),
        "hysteresis consecutive_hysteresis",
    ),
    "fp16.min_loss_scale": none("no lower bound but 1; strategy.max_not_finite_steps ends a run that only skips"),
    **section("fp16", none("not needed: autocast casts what matrix products take"), "auto_cast fused_mode"),
    "fp16.fp16_master_weights_and_grads": none("masters stay fp32 under 16-mixed"),
    **section("bf16", fact("bf16"), "enabled"),
    **section("bfloat16", fact("bf16"), "enabled"),
    **{
        f"{name}.{key}": rule
        for name in ("bf16", "bfloat16")
        for key, rule in {
            "bf16_master_weights_and_grads": fact("bf16_masters"),
            "bf16_optimizer_states": fact("bf16_states"),
            "immediate_grad_update": none("not needed: gradients go into the sum of their shard as they are reduced"),
            "check_grad_overflow": differs("inf and NaN are always looked for: such a step is skipped on all ranks"),
        }.items()
    },
    "torch_autocast.enabled": fact("autocast"),
    "torch_autocast.dtype": fact("autocast_dtype"),
    "torch_autocast.lower_precision_safe_modules": differs(
        "here the weights of all modules that multiply matrices travel in 16 bits; strategy.keep_fp32 names those "
        "that "
        "shall not"
    ),
    "data_types.grad_accum_dtype": fact("grad_accum_dtype"),
    **section(
        "data_types",
        differs("the types are those of trainer.precision; strategy.keep_fp32 names modules that stay fp32"),
        "param_dtype buffer_dtype keep_in_fp32_modules",
    ),
    "amp.enabled": fact("amp"),
    "amp.*": none("Apex's options: trainer.precision 16-mixed is torch's own autocast with a loss scale"),
    # ZeRO: zero_keys.py
    "zero_optimization": fact("stage"),
    **{f"zero_optimization.{name}": rule for name, rule in ZERO_KEYS.items()},
    **section(
        "",
        ZERO_KEYS["zero_allow_untested_optimizer"],
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
    "allgather_size": ZERO_KEYS["allgather_size"],
    # Activations
    **section(
        "activation_checkpointing",
        _RECOMPUTE,
        "partition_activations cpu_checkpointing number_checkpoints "
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile keep_last min_bytes",
    ),
    # Logs and measurements
    "steps_per_print": fact("print_steps"),
    **section("", _TIMERS, "wall_clock_breakdown memory_breakdown"),
    **section("timers", _TIMERS, "throughput.enabled throughput.synchronized"),
    "dump_state": none("`shardlight fit CONFIG --print` shows every value and where it comes from"),
    "log_level": none("not needed: warnings come once, and from rank 0"),
    "disable_python_gc": none("not needed: call gc.freeze() in your module if the collector ever shows in a profile"),
    **section(
        "flops_profiler",
        _FLOPS,
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    "tensorboard.enabled": fact("tensorboard"),
    "tensorboard.output_path": fact("tensorboard"),
    "tensorboard.job_name": fact("tensorboard"),
    **section("wandb", _LOGGER, "enabled group team project"),
    **section(
        "comet",
        _LOGGER,
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    **section("csv_monitor", _LOGGER, "enabled output_path job_name"),
    **section("monitor_config", _LOGGER, "tensorboard wandb csv_monitor comet"),
    "monitor_config.*": _LOGGER,
    **section("comms_logger", _COMMS, "enabled verbose prof_all debug prof_ops"),
    # Checkpoints
    **section(
        "checkpoint",
        _CHECKPOINT,
        "tag_validation load_universal use_node_local_storage parallel_write.pipeline_stage "
        "checkpoint_serialization writer",
    ),
    "checkpoint.writer.*": _CHECKPOINT,
    "checkpoint.serialization": _CHECKPOINT,
    "datastates_ckpt.*": _FREE,
    "nebula.*": _FREE,
    # Compilation
    **section(
        "compile",
        _COMPILE,
        "enabled deepcompile passes backend kwargs free_activation free_activation_threshold "
        "offload_activation offload_activation_pin offload_opt_states offload_parameters double_buffer "
        "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_int_input_tensors keep_all_input_tensors autoep_non_moe",
    ),
    "graph_harvesting": _REMOVED,
    # Data
    "data_efficiency.*": _DATA,
    "curriculum_learning.*": _DATA,
    # Other kinds of parallelism
    **section(
        "pipeline",
        _PIPELINE,
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant",
    ),
    **section(
        "tensor_parallel",
        _TENSOR,
        "autotp_size tp_size preset_model tp_overlap_comm partition_config "
        "vocab_parallel_lm_head vocab_parallel_ce_backend keep_module_on_host dtype",
    ),
    "tensor_parallel.partition_config.*": _TENSOR,
    "expert_parallel.*": _EXPERTS,
    "use_data_before_expert_parallelism": _EXPERTS,
    "sequence_parallel_size": none("no sequence parallelism in this version"),
    "seq_parallel_communication_data_type": none("no sequence parallelism in this version"),
    "seq_parallel_comm_data_type": none("no sequence parallelism in this version"),
    "data_parallel_size": none("not needed: all ranks are data parallel"),
    # What DeepSpeed has beside training, or had
    **section(
        "aio", _AIO, "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds"
    ),
    **section(
        "elasticity",
        _ELASTIC,
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
        "prefer_larger_batch ignore_non_elastic_batch_info version model_parallel_size num_gpus_per_node",
    ),
    **section(
        "autotuning",
        _TUNING,
        "enabled fast metric start_profile_step end_profile_step tuner_type "
        "num_tuning_micro_batch_sizes min_train_micro_batch_size_per_gpu max_train_micro_batch_size_per_gpu "
        "tuner_early_stopping tuner_num_trials max_train_batch_size min_train_batch_size mp_size arg_mappings "
        "results_dir exps_dir overwrite metric_path model_info model_info_path",
    ),
    "autotuning.arg_mappings.*": _TUNING,
    "autotuning.model_info.*": _TUNING,
    **section(
        "hybrid_engine",
        _HYBRID,
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    "sparse_attention.*": _SPARSE,
    "compression_training.*": _COMPRESSION,
    "quantize_training.*": _COMPRESSION,
    "weight_quantization.*": _COMPRESSION,
    "eigenvalue.*": _REMOVED,
    "progressive_layer_drop.*": _REMOVED,
    "vocabulary_size": none("not needed: an argument of your module, if it takes one"),
}
"""Dotted key of a DeepSpeed config -> rule."""

IGNORED = "DeepSpeed ignores such a key without a word: this setting had no effect"
_REFUSED = "not a key of the DeepSpeed versions known here, which refuse such a key"
REFUSING = dict.fromkeys(
    [
        "zero_optimization",
        "fp16",
        "bf16",
        "bfloat16",
        "hybrid_engine",
        "tensor_parallel",
        "compile",
        "comms_logger",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
    ],
    _REFUSED,
) | {"": IGNORED}
"""Section -> what DeepSpeed does with an unknown key in it; "": everywhere else."""
