"""The table for `zero_optimization` of a DeepSpeed config: every key it has or had, up to 0.19."""

from shardlight.framework.migrate.rules import Rule, differs, fact, none, section

_BUCKETS = none(
    "not needed: what travels together is a unit, a block of the model (strategy.units names others), not a bucket "
    "of a "
    "size"
)
_STORAGE = none("not needed: gradients and weights of a unit always lie in one piece of memory")
_OVERLAP = none("there is no such switch: the engine arranges its exchanges by itself")
_FETCH = none(
    "not needed: which weights stay gathered is not a matter of sizes. strategy.keep_gathered (no, backward, "
    "window, auto) "
    "says how long a unit's weights stay"
)
_DETAIL = none("not needed: a detail of DeepSpeed's own engine")
_OFFLOAD = none("goes with the offload: strategy infinity sizes its staging itself, on CPU ranks alone in this version")
_QUANTIZED = none(
    "nothing is quantized on its way; strategy.reduce_dtype: bfloat16 halves the gradients, and the weights of "
    "bf16-true "
    "and bf16-mixed travel in 16 bits"
)
_ZENFLOW = none("no updates that lag behind: every step is whole")
_SAVING = none(
    "not needed: a checkpoint holds all weights under any strategy; `shardlight export PATH --to safetensors --out "
    "FILE` "
    "writes them whole, and `strategy.gathered(module)` gives them to your code"
)

ZERO_KEYS: dict[str, Rule] = {
    "stage": fact("stage"),
    **section("", _STORAGE, "contiguous_gradients memory_efficient_linear parameter_alignment"),
    **section(
        "",
        _BUCKETS,
        "reduce_bucket_size allgather_bucket_size allgather_partitions allgather_size reduce_scatter "
        "use_multi_rank_bucket_allreduce sub_group_size",
    ),
    "overlap_comm": _OVERLAP,
    "round_robin_gradients": none("not needed: the ranks' shares of every parameter are even"),
    "ignore_unused_parameters": none("not needed: parameters that a step does not use are always allowed"),
    "compute_grad_norm": none(
        "not needed: the norm is computed where trainer.gradient_clip_val or your module asks for it"
    ),
    "gradient_allreduce_op": fact("gradient_op"),
    "load_from_fp32_weights": none("not needed: a checkpoint holds the fp32 masters, and loads them"),
    "elastic_checkpoint": none("not needed: a checkpoint goes on under any strategy and on any number of ranks"),
    "pipeline_loading_checkpoint": none("not needed: each rank reads only its own part of a checkpoint"),
    **section(
        "",
        _DETAIL,
        "legacy_stage1 grad_hooks override_module_apply enable_sanity_checks log_trace_cache_warnings "
        "save_muon_momentum_buffer_in_memory",
    ),
    **section(
        "",
        _FETCH,
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_use_all_reduce_for_fetch_params "
        "use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential",
    ),
    **section("", fact("keep_small"), "stage3_param_persistence_threshold param_persistence_threshold"),
    **section(
        "",
        none("no bound on what strategy.keep_small keeps whole: it is a bound for each parameter only"),
        "stage3_model_persistence_threshold model_persistence_threshold",
    ),
    **section(
        "",
        differs(
            "strategy.units names the classes of modules that are gathered as one; unset: the blocks of the "
            "model's block "
            "lists. Check whether fine-grained modules lie outside of those"
        ),
        "stage3_module_granularity_threshold module_granularity_threshold",
    ),
    **section(
        "leaf_module",
        differs(
            "a module whose class strategy.units names is gathered as one with all below it, and so is each block "
            "of the "
            "model's block lists, experts included: naming units replaces the blocks. Check that they lie inside "
            "of one"
        ),
        "classes names name_suffixes",
    ),
    **section(
        "",
        _SAVING,
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
    ),
    **section(
        "",
        none("not needed: under zero3 a module is built without memory, unit by unit"),
        "stage3_partition_stream_chunk_size partition_stream_chunk_size",
    ),
    "offload_optimizer.device": fact("offload_optimizer"),
    **section(
        "offload_optimizer",
        _OFFLOAD,
        "nvme_path pin_memory buffer_count buffer_size pipeline pipeline_read pipeline_write fast_init ratio "
        "super_offload "
        "cpuadam_cores_perc",
    ),
    "offload_param.device": fact("offload_param"),
    **section("offload_param", _OFFLOAD, "nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    **section("", fact("offload_old"), "cpu_offload cpu_offload_param cpu_offload_params"),
    "cpu_offload_use_pin_memory": _OFFLOAD,
    **section(
        "zenflow",
        _ZENFLOW,
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds "
        "pt_reserved_cores_perc steps_per_epoch",
    ),
    "zero_hpz_partition_size": fact("hpz"),
    "mics_shard_size": fact("mics"),
    "mics_hierarchical_params_gather": none("not needed: gathers stay within a group of strategy.shard_group"),
    **section(
        "",
        _QUANTIZED,
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights zeropp_loco_param",
    ),
    "zeropp_loco_param.*": _QUANTIZED,
    **section(
        "",
        none("not needed: any torch optimizer trains; one that needs whole parameters says so, see the README"),
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
}
"""Key below `zero_optimization` -> rule."""
