"""What a plan says, as plain values: steps, tokens, learning rates, parameters, labels, disk.

Owns the arithmetic that is only for people; nothing here decides anything about the run. Leaves
what is allowed to `plan.check` and the wording to `plan_view`. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import Any

import numpy as np

from ds_sft import presets
from ds_sft.data.model_files import ModelFiles
from ds_sft.data.order import LEVANTER_ORDERS
from ds_sft.engine.config import optimizer_kind
from ds_sft.plan import Plan
from ds_sft.recipe import cadence, low_rank
from ds_sft.recipe.batching import BatchPlan
from ds_sft.recipe.decay import is_decayed
from ds_sft.recipe.recipe import Recipe
from ds_sft.recipe.schedule import Schedule
from ds_sft.run_config import RunConfig

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_EPOCHS_BY_DEFAULT = 8


def facts(plan: Plan) -> dict[str, Any]:
    """Everything a plan says, as plain values for JSON."""
    recipe, schedule = plan.recipe, plan.schedule
    return {
        "recipe": dataclasses.asdict(recipe),
        "batch": _batch_facts(plan),
        "steps": _step_facts(plan),
        "learning_rate": [
            {"step": step, "lr": recipe.learning_rate * schedule.lr_multiplier(step), "what": what}
            for step, what in corner_steps(schedule)
        ],
        "targets": _target_facts(plan),
        "validation": None if plan.validation is None else _validation_facts(plan),
        "model": None if plan.model is None else _model_facts(plan.model),
        "exports": cadence.labels(schedule.num_steps, recipe.steps_per_hf_export),
        "checkpoints": cadence.labels(schedule.num_steps, recipe.steps_per_checkpoint),
        "disk": disk_facts(plan.run, recipe, schedule.num_steps, plan.model),
        "data": {
            "path": str(plan.data.path),
            "manifest_sha256": plan.data.manifest_sha256,
            "tokenizer": None if plan.data.tokenizer_dir is None else str(plan.data.tokenizer_dir),
            "manifest": {k: v for k, v in plan.data.manifest.items() if k != "sha256"},
        },
        "optimizer": _optimizer_text(plan),
        "routes": _routes(plan),
        "ds_config": plan.ds_config,
        "notes": [
            *presets.describe(plan.run.preset, plan.run.preset_origins),
            *plan.notes,
            *(f"passed over: {reason}" for reason in plan.passed_over),
        ],
    }


def _batch_facts(plan: Plan) -> dict[str, Any]:
    batches, length = plan.batches, plan.data.max_seq_len
    return {
        "train_batch_size": batches.batch_size,
        "max_seq_len": length,
        "tokens_per_step": batches.batch_size * length,
        "loss_groups": batches.num_groups,
        "microbatches_per_group": batches.micro_per_group,
        "microbatches_per_step": batches.micro_per_step,
        "world_size": batches.world_size,
        "per_device_batch": batches.per_device_batch,
        "idle_slots": batches.idle_slots,
        "idle_share": round(batches.idle_share, 4),
    }


def _step_facts(plan: Plan) -> dict[str, Any]:
    data, batch = plan.data, plan.recipe.train_batch_size
    steps = plan.schedule.num_steps
    num_docs = len(data.doc_lens)
    # Levanter's orders hold the whole run; every other one is walked around.
    once = data.num_packs if plan.recipe.order in LEVANTER_ORDERS else len(plan.batches.order)
    return {
        "num_train_steps": steps,
        "warmup_steps": plan.schedule.warmup_steps,
        "stable_steps": plan.schedule.stable_steps,
        "decay_steps": plan.schedule.decay_steps,
        "epochs": round(steps * batch / once, 4),
        "num_packs": data.num_packs,
        "num_docs": num_docs,
        "steps_of_8_epochs_by_packs": -(-_EPOCHS_BY_DEFAULT * data.num_packs // batch),
        "steps_of_8_epochs_by_documents": -(-_EPOCHS_BY_DEFAULT * num_docs // batch),
    }


def corner_steps(schedule: Schedule) -> list[tuple[int, str]]:
    """The steps at which the schedule changes, each once, with what happens there."""
    last = schedule.num_steps - 1
    decay = schedule.num_steps - schedule.decay_steps
    named = [
        (0, "first"),
        (1, "second"),
        (schedule.warmup_steps - 1, "last of the warmup"),
        (schedule.warmup_steps if schedule.warmup_steps else -1, "warmup done"),
        (decay, "decay begins"),
        (schedule.num_steps // 2, "middle"),
        (last, "last"),
    ]
    corners: dict[int, list[str]] = {}
    for step, what in named:
        if 0 <= step <= last:
            corners.setdefault(step, []).append(what)
    return [(step, ", ".join(corners[step])) for step in sorted(corners)]


def _target_facts(plan: Plan) -> dict[str, Any]:
    total = int(np.asarray(plan.data.assistant_counts).sum())
    documents = int(np.asarray(plan.data.doc_lens, dtype=np.int64).sum())
    per_step = step_targets(plan.batches, plan.schedule.num_steps)
    return {
        "assistant_tokens": total,
        "document_tokens": documents,
        "assistant_share": round(total / max(documents, 1), 4),
        "fill": round(documents / plan.data.tokens.size, 4),
        "per_step_min": int(per_step.min()),
        "per_step_mean": round(float(per_step.mean()), 1),
        "per_step_max": int(per_step.max()),
        "whole_run": int(per_step.sum()),
    }


def _validation_facts(plan: Plan) -> dict[str, Any]:
    validation = plan.validation
    assert validation is not None
    labels = cadence.labels(plan.schedule.num_steps, validation.every)
    data, num_micro = validation.data, validation.batches.num_micro
    return {
        "path": str(data.path),
        "every": validation.every,
        "labels": labels,
        "num_packs": data.num_packs,
        "assistant_tokens": int(np.asarray(data.assistant_counts).sum()),
        "document_tokens": int(np.asarray(data.doc_lens, dtype=np.int64).sum()),
        "microbatches": num_micro,
        "microbatches_whole_run": num_micro * len(labels),
        "training_microbatches": plan.batches.micro_per_step * plan.schedule.num_steps,
    }


def step_targets(batches: BatchPlan, num_steps: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Trained target tokens of every step, int64 [num_steps]."""
    counts = np.asarray(batches.counts, dtype=np.int64)[np.asarray(batches.order)]
    sums = np.concatenate([[0], np.cumsum(counts)])
    rounds, rest = np.divmod(
        np.arange(num_steps + 1, dtype=np.int64) * batches.batch_size, len(counts)
    )
    return np.asarray(np.diff(rounds * sums[-1] + sums[rest]))


def _optimizer_text(plan: Plan) -> str:
    if plan.recipe.apollo is None:
        return optimizer_kind(plan.ds_config)
    return low_rank.in_words(plan.recipe)


def _routes(plan: Plan) -> list[str]:
    """Who takes which way with APOLLO; nothing to say of AdamW or an unknown model."""
    if plan.recipe.apollo is None or plan.model is None:
        return []
    tensors = low_rank.by_name(plan.model.shapes)
    return low_rank.table(tensors, plan.recipe.apollo.rank, plan.batches.world_size)


def _model_facts(model: ModelFiles) -> dict[str, Any]:
    groups: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for name, (shape, _) in model.tensors.items():
        groups[is_decayed(name)][name] = math.prod(shape)
    return {
        "directory": str(model.directory),
        "architecture": model.config["architectures"][0],
        "parameters": model.num_parameters,
        "stored_as": sorted({dtype for _, dtype in model.tensors.values()}),
        "tied": model.tied,
        "vocab_size": model.vocab_size,
        **{
            kind: {
                "tensors": len(group),
                "parameters": sum(group.values()),
                "sample": sorted(group, key=lambda n: ("layers" in n and ".0." not in n, n))[:4],
            }
            for kind, group in (("decayed", groups[True]), ("not_decayed", groups[False]))
        },
    }


def disk_facts(
    run: RunConfig, recipe: Recipe, num_steps: int, model: ModelFiles | None
) -> dict[str, Any]:
    """Bytes that the run directory will hold at most, and bytes free at --out."""
    from ds_sft.run.place import existing_parent

    free = None if run.out is None else shutil.disk_usage(existing_parent(run.out)).free
    if model is None:
        return {"free": free, "needed": None}
    one = low_rank.checkpoint_bytes(model.shapes, recipe)
    num_labels = len(cadence.labels(num_steps, recipe.steps_per_checkpoint))
    kept = min(run.keep_checkpoints or num_labels, num_labels)
    # The oldest goes only after the newest is whole, and a temporary one may lie beside them.
    in_flight = 1 if kept < num_labels else 0
    temporary = 1 if run.temp_checkpoint_minutes > 0 else 0
    num_exports = len(cadence.labels(num_steps, recipe.steps_per_hf_export))
    one_export = _DTYPE_BYTES[run.hf_export_dtype] * model.num_parameters
    checkpoints = (kept + in_flight + temporary) * one
    return {
        "checkpoint": one,
        "checkpoints_kept": kept,
        "checkpoints_at_most": kept + in_flight + temporary,
        "checkpoints": checkpoints,
        "export": one_export,
        "num_exports": num_exports,
        "exports": num_exports * one_export,
        "needed": checkpoints + num_exports * one_export,
        "free": free,
    }
