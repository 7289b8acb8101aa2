"""Which keys a DeepSpeed JSON may hold, and why the others are refused.

Owns one static table of DeepSpeed 0.19's keys, at every level: ACCEPTED says what moves only
memory, speed or logging, with the type of its value; REFUSED says of every other key that DeepSpeed
knows what to do instead. Invariant: together they name every key that DeepSpeed reads (a test
compares them with its own models), so whatever is in neither is a misspelling, which DeepSpeed
itself would accept in silence at the top level. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a key accepts."""

    kind: str
    """true or false, a whole number, a number, a text, a list of texts, or one of `choices`."""
    low: float = 0
    """Smallest number accepted."""
    high: float = float("inf")
    """Largest number accepted."""
    choices: tuple[str, ...] = ()
    """The texts accepted; empty = any."""


Rules = dict[str, "Value | Rules"]

BOOL = Value(kind="true or false")
COUNT = Value(kind="a whole number")
POSITIVE = Value(kind="a whole number", low=1)
SHARE = Value(kind="a number", high=1)
TEXT = Value(kind="a text")
TEXTS = Value(kind="a list of texts")
DEVICE = Value(kind="a text", choices=("none", "cpu", "nvme"))

_FILE_LOG: Rules = {"enabled": BOOL, "output_path": TEXT, "job_name": TEXT}

ACCEPTED: Rules = {
    "zero_optimization": {
        "stage": COUNT,
        "contiguous_gradients": BOOL,
        "overlap_comm": BOOL,
        "reduce_bucket_size": POSITIVE,
        "sub_group_size": POSITIVE,
        "stage3_prefetch_bucket_size": COUNT,
        "stage3_param_persistence_threshold": COUNT,
        "stage3_model_persistence_threshold": COUNT,
        "stage3_max_live_parameters": COUNT,
        "stage3_max_reuse_distance": COUNT,
        "stage3_gather_16bit_weights_on_model_save": BOOL,
        "stage3_module_granularity_threshold": COUNT,
        "stage3_use_all_reduce_for_fetch_params": BOOL,
        "stage3_allgather_sequential": BOOL,
        "zero_hpz_partition_size": POSITIVE,
        "memory_efficient_linear": BOOL,
        "log_trace_cache_warnings": BOOL,
        "enable_sanity_checks": BOOL,
        "offload_param": {
            "device": DEVICE,
            "nvme_path": TEXT,
            "buffer_count": COUNT,
            "buffer_size": COUNT,
            "max_in_cpu": COUNT,
            "pin_memory": BOOL,
        },
        "offload_optimizer": {
            "device": DEVICE,
            "nvme_path": TEXT,
            "buffer_count": COUNT,
            "pin_memory": BOOL,
            "pipeline_read": BOOL,
            "pipeline_write": BOOL,
            "fast_init": BOOL,
            "ratio": SHARE,
        },
        "leaf_module": {"classes": TEXTS, "names": TEXTS, "name_suffixes": TEXTS},
    },
    "aio": {
        "block_size": POSITIVE,
        "queue_depth": POSITIVE,
        "intra_op_parallelism": POSITIVE,
        "single_submit": BOOL,
        "overlap_events": BOOL,
        "use_gds": BOOL,
    },
    "checkpoint": {
        "tag_validation": Value(kind="a text", choices=("Ignore", "Warn", "Fail")),
    },
    "tensorboard": _FILE_LOG,
    "csv_monitor": _FILE_LOG,
    "comms_logger": {
        "enabled": BOOL,
        "prof_all": BOOL,
        "prof_ops": TEXTS,
        "verbose": BOOL,
        "debug": BOOL,
    },
    "flops_profiler": {
        "enabled": BOOL,
        "recompute_fwd_factor": Value(kind="a number"),
        "profile_step": POSITIVE,
        "module_depth": Value(kind="a whole number", low=-1),
        "top_modules": POSITIVE,
        "detailed": BOOL,
        "output_file": TEXT,
    },
    "timers": {"throughput": {"enabled": BOOL, "synchronized": BOOL}},
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
    "disable_python_gc": BOOL,
    "log_level": Value(
        kind="a text", choices=("debug", "info", "warning", "error", "critical")
    ),
}  # fmt: skip

_OWNED = "is decided by ds_sft: drop it and use {}"
_NUMBERS = "changes the numbers, so the curve would not be Levanter's: drop it"
_QUANTIZED = (
    "rounds {} to 8 or 4 bits, so the curve would not be Levanter's, and no test without a GPU can "
    "show by how much: drop it"
)
_REMOVED = "was removed from DeepSpeed: drop it"
_ZERO12 = "has no effect under ZeRO stage 3: drop it"
_PARALLEL = "is a kind of parallelism that ds_sft does not have: drop it"
_OFFLOAD_OLD = 'is the old spelling: use "{}": {{"device": "cpu"}}'

REFUSED: dict[str, str] = {
    "train_batch_size": _OWNED.format("--train-batch-size"),
    "train_micro_batch_size_per_gpu": _OWNED.format("--per-device-batch"),
    "gradient_accumulation_steps": _OWNED.format(
        "--train-batch-size, --loss-groups and --per-device-batch, from which it follows"
    ),
    "managed_gradient_accumulation": "is decided by ds_sft, which marks the boundary: drop it",
    "gradient_clipping": _OWNED.format("--max-grad-norm"),
    "optimizer": _OWNED.format(
        "--learning-rate, --weight-decay, --beta1, --beta2, --eps (the kind follows from "
        "zero_optimization.offload_optimizer)"
    ),
    "scheduler": _OWNED.format("--lr-schedule, --warmup, --decay and --min-lr-ratio"),
    "bf16": _OWNED.format("--compute-dtype, --master-dtype and --optimizer-state-dtype"),
    "bfloat16": _OWNED.format("--compute-dtype, --master-dtype and --optimizer-state-dtype"),
    "fp16": _OWNED.format("--compute-dtype bfloat16: float16 has no place on Levanter's curve"),
    "torch_autocast": _OWNED.format("--compute-dtype"),
    "data_types": _OWNED.format("--compute-dtype and --grad-reduce-dtype"),
    "communication_data_type": _OWNED.format("--grad-reduce-dtype"),
    "steps_per_print": _OWNED.format("--log-every"),
    "wandb": _OWNED.format("--wandb-project, --wandb-name and --wandb-id"),
    "comet": "is not supported: use --wandb-project, or the tensorboard or csv_monitor section",
    "zero_allow_untested_optimizer": "is decided by ds_sft, which picks the optimizer: drop it",
    "zero_force_ds_cpu_optimizer": "is decided by ds_sft, which picks the optimizer: drop it",
    "prescale_gradients": _NUMBERS,
    "gradient_predivide_factor": _NUMBERS,
    "gradient_allreduce_op": _NUMBERS,
    "weight_quantization": _NUMBERS,
    "data_efficiency": _NUMBERS,
    "compile": "is not supported (DeepCompile): drop it",
    "activation_checkpointing": _OWNED.format("--recompute-every and --offload-activations"),
    "seq_parallel_communication_data_type": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "data_parallel_size": _PARALLEL,
    "tensor_parallel": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "use_data_before_expert_parallelism": _PARALLEL,
    "pipeline": _PARALLEL,
    "hybrid_engine": "is for inference within training, which ds_sft does not do: drop it",
    "autotuning": "is not supported: ds-sft plan says what fits; drop it",
    "datastates": "is a checkpoint writer that ds_sft cannot read back: drop it",
    "datastates_ckpt": "is a checkpoint writer that ds_sft cannot read back: drop it",
    "disable_allgather": _ZERO12,
    "allgather_size": _ZERO12,
    "vocabulary_size": "is read from the model: drop it",
    "dataloader_drop_last": "is ignored: ds_sft reads the packs itself; drop it",
    "checkpoint.writer": "is refused: such checkpoints cannot be read back; drop it",
    "checkpoint.load_universal": "is decided by ds_sft: use --resume",
    "checkpoint.use_node_local_storage": "is refused: --out must be one disk that all hosts share",
    "checkpoint.parallel_write": _ZERO12,
    "checkpoint.checkpoint_serialization": "is refused: exports map the default format; drop it",
    "zero_optimization.reduce_scatter": "is decided by ds_sft (always true): drop it",
    "zero_optimization.zero_quantized_weights": _QUANTIZED.format("every weight at every gather"),
    "zero_optimization.zero_quantized_nontrainable_weights": "is for frozen weights, and ds_sft "
    "trains all: drop it",
    "zero_optimization.zero_quantized_gradients": _QUANTIZED.format("gradients between hosts"),
    "zero_optimization.zenflow": "changes the numbers (most of an update comes late, and masters "
    "take over rounded weights), and its moments are in no checkpoint: drop it",
    "zero_optimization.offload_optimizer.super_offload": "keeps Adam's moments in a process of "
    "its own, which no checkpoint holds: drop it",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "is read with super_offload only: "
    "drop it, and set OMP_NUM_THREADS",
    "zero_optimization.cpu_offload": _OFFLOAD_OLD.format("offload_optimizer"),
    "zero_optimization.cpu_offload_param": _OFFLOAD_OLD.format("offload_param"),
    "zero_optimization.cpu_offload_use_pin_memory": "is the old spelling: use pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "is the old spelling: drop it",
    "zero_optimization.load_from_fp32_weights": "is decided by ds_sft (always true): drop it",
    "zero_optimization.elastic_checkpoint": _ZERO12,
    "zero_optimization.pipeline_loading_checkpoint": "is decided by ds_sft: drop it",
    "zero_optimization.override_module_apply": "is decided by ds_sft: drop it",
    "zero_optimization.ignore_unused_parameters": "is refused: all must be used; drop it",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "is Muon's: drop it",
    "zero_optimization.allgather_bucket_size": _ZERO12,
    "zero_optimization.allgather_partitions": _ZERO12,
    "zero_optimization.compute_grad_norm": _ZERO12,
    "zero_optimization.legacy_stage1": _ZERO12,
    "zero_optimization.parameter_alignment": _ZERO12,
    "zero_optimization.round_robin_gradients": _ZERO12,
    "zero_optimization.use_multi_rank_bucket_allreduce": _ZERO12,
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
    "amp": _REMOVED,
    "compression_training": _REMOVED,
    "curriculum_learning": _REMOVED,
    "eigenvalue": _REMOVED,
    "elasticity": _REMOVED,
    "graph_harvesting": _REMOVED,
    "nebula": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
}
