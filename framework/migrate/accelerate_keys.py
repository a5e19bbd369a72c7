"""The table for a config file of Hugging Face accelerate."""

from shardlight.framework.migrate.rules import Rule, differs, fact, none, section

_LAUNCH = none(
    "not needed in the config: on several machines start the processes with torchrun or srun (README, Several machines)"
)
_TPU = none("no TPUs: accelerator is cpu or cuda")
_MEGATRON = none("no tensor, pipeline or sequence parallelism in this version: zero3 shards the weights instead")
_FP8 = none("no fp8: bf16-mixed is the nearest precision")
_BUILT = none(
    "not needed: under zero3 a module is built without memory, and all ranks have rank 0's values (strategy.defer)"
)
_FLAT = none("not needed: parameters keep their names and shapes under every strategy")
_PREFETCH = none("there is no such switch: the engine arranges its exchanges by itself")
_OPTIONS = differs(
    "the blocks are compiled with torch's default mode, and recompiled by themselves where shapes change. Check "
    "the speed"
)
_SAGEMAKER = none("no SageMaker: start the processes with torchrun there")

ACCELERATE_KEYS: dict[str, Rule] = {
    "compute_environment": fact("environment"),
    "distributed_type": fact("distributed"),
    "num_processes": fact("processes"),
    "num_machines": fact("machines"),
    "machine_rank": _LAUNCH,
    **section(
        "",
        _LAUNCH,
        "main_process_ip main_process_port rdzv_backend same_network main_training_function rdzv_conf max_restarts "
        "monitor_interval",
    ),
    "gpu_ids": none("not needed: CUDA_VISIBLE_DEVICES says which devices there are, trainer.devices how many"),
    "use_cpu": fact("use_cpu"),
    "enable_cpu_affinity": none("the processes are not bound to cores: do that with numactl or the launcher"),
    "debug": none("not needed: ranks that do not agree on an exchange are always named"),
    "mixed_precision": fact("mixed"),
    "fp16": fact("mixed_old"),
    "downcast_bf16": none("of TPUs only"),
    "gradient_accumulation_steps": fact("accumulation"),
    "gradient_clipping": fact("clipping"),
    # DeepSpeed inside
    "deepspeed_config.deepspeed_config_file": fact("deepspeed_file"),
    "deepspeed_config.zero_stage": fact("stage"),
    "deepspeed_config.gradient_accumulation_steps": fact("accumulation"),
    "deepspeed_config.gradient_clipping": fact("clipping"),
    "deepspeed_config.offload_optimizer_device": fact("offload_optimizer"),
    "deepspeed_config.offload_param_device": fact("offload_param"),
    **section(
        "deepspeed_config",
        none("goes with the offload: strategy infinity sizes its staging itself, on CPU ranks alone in this version"),
        "offload_optimizer_nvme_path offload_param_nvme_path",
    ),
    "deepspeed_config.zero3_init_flag": _BUILT,
    "deepspeed_config.zero3_save_16bit_model": none(
        "not needed: `shardlight export PATH --to safetensors --out FILE` writes the weights of any checkpoint"
    ),
    "deepspeed_config.deepspeed_moe_layer_cls_names": differs(
        "a block with its experts is gathered as one unit already; strategy.units names other classes. Check that "
        "the "
        "experts lie inside the model's block lists"
    ),
    **section(
        "deepspeed_config",
        _LAUNCH,
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
    ),
    # FSDP
    "fsdp_config.fsdp_version": none(
        "not needed: versions 1 and 2 shard alike; what they keep gathered is written out"
    ),
    "fsdp_config.fsdp_sharding_strategy": fact("fsdp_sharding"),
    "fsdp_config.fsdp_reshard_after_forward": fact("fsdp_reshard"),
    "fsdp_config.fsdp_auto_wrap_policy": fact("fsdp_wrap"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": fact("fsdp_classes"),
    "fsdp_config.fsdp_min_num_params": differs(
        "units are not made by size: strategy.units names classes; unset: the blocks of the model's block lists"
    ),
    "fsdp_config.fsdp_offload_params": fact("offload_fsdp"),
    "fsdp_config.fsdp_activation_checkpointing": fact("fsdp_recompute"),
    "fsdp_config.fsdp_state_dict_type": none(
        "not needed: a checkpoint is always sharded and opens anywhere; `shardlight export` writes full weights"
    ),
    **section("fsdp_config", _BUILT, "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states"),
    **section("fsdp_config", _FLAT, "fsdp_use_orig_params"),
    **section(
        "fsdp_config",
        _PREFETCH,
        "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_limit_all_gathers",
    ),
    "fsdp_config.fsdp_ignored_modules": none("no module is left out of sharding"),
    "fsdp_config.fsdp_mixed_precision_policy": differs(
        "trainer.precision says the types; strategy.reduce_dtype in which gradients travel. Check both"
    ),
    # torch.compile
    "dynamo_config.dynamo_backend": fact("dynamo"),
    "dynamo_backend": fact("dynamo"),
    "dynamo_config.dynamo_use_regional_compilation": fact("dynamo_regional"),
    **section("dynamo_config", _OPTIONS, "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph"),
    # Elsewhere
    "fp8_config": _FP8,
    "fp8_config.*": _FP8,
    "megatron_lm_config.*": _MEGATRON,
    "parallelism_config.*": _MEGATRON,
    "tp_config.*": _MEGATRON,
    "ipex_config.*": none("no extension for Intel devices: PyTorch's own CPU code, and shardlight's compiled ops"),
    "mpirun_config.*": _LAUNCH,
    **section("", _TPU, "tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone command_file commands"),
    **section(
        "",
        _SAGEMAKER,
        "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
        "transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
    ),
    "additional_args.*": _SAGEMAKER,
}
"""Dotted key of an accelerate config -> rule."""

REFUSING = {"": "accelerate refuses such a key"} | dict.fromkeys(
    ["deepspeed_config", "fsdp_config", "dynamo_config"],
    "accelerate passes such a key on and nothing reads it: this setting had no effect",
)
"""Section -> what accelerate does with an unknown key in it."""
