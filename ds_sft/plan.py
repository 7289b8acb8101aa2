"""Everything that can be said about a run before a GPU is touched.

Owns `check`, which `train` calls as its first act: a plan that passes is a run that starts. It
raises the first error that the run would hit in its arguments, its data, its model's files or its
DeepSpeed JSON, and collects notes about what it could not check. Invariants: no torch, no network,
under a second. Leaves what the numbers mean to `recipe`, and how they look to `plan_view`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from ds_sft import presets
from ds_sft.data.geometry import note_large_heads
from ds_sft.data.model_files import ModelFiles, find_model
from ds_sft.data.order import run_order
from ds_sft.data.packed import PackedDataset
from ds_sft.engine import swap_files
from ds_sft.engine.config import engine_config, read_json
from ds_sft.engine.placement import note_host_memory
from ds_sft.errors import ConfigError, DataError
from ds_sft.plan_data import (
    Validation,
    check_pair,
    check_tokenizers,
    note_template,
    open_validation,
)
from ds_sft.recipe import cadence, low_rank
from ds_sft.recipe.batching import BatchPlan
from ds_sft.recipe.entries import length_notes
from ds_sft.recipe.recipe import Recipe
from ds_sft.recipe.schedule import Schedule
from ds_sft.run import changes, resume
from ds_sft.run.place import check_place
from ds_sft.run_config import RunConfig

SECONDS_AFTER_SIGTERM = 30  # then DeepSpeed's launcher kills
ASSUMED_GB_PER_SECOND = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that was checked, with everything derived from its arguments."""

    run: RunConfig
    """Where and when."""
    recipe: Recipe
    """The science, with `num_train_steps` final."""
    data: PackedDataset
    """The packed data set."""
    schedule: Schedule
    """Learning rate by step."""
    batches: BatchPlan
    """Packs by step and rank."""
    validation: Validation | None
    """What is evaluated, and when; None = nothing."""
    ds_config: dict[str, Any]
    """The complete dictionary for `deepspeed.initialize`."""
    model: ModelFiles | None
    """The model's files; None when the Hub's cache of this machine does not hold them."""
    tokenizer_dir: Path | None
    """Whose tokenizer the exports get; None only while the model is None."""
    resume_from: resume.ResumePoint | None
    """The checkpoint that the run goes on from; None when it starts at step 0."""
    passed_over: list[str]
    """Checkpoints that are not whole, and why."""
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and what is odd but allowed."""

    @property
    def data_sha256(self) -> str:
        """What two ranks with the same data agree on, validation included."""
        validation = "" if self.validation is None else self.validation.data.manifest_sha256
        return self.data.manifest_sha256 + validation


def check(run: RunConfig, recipe: Recipe, world_size: int) -> Plan:
    """The plan of a run on `world_size` ranks. Raises ConfigError or DataError, in one line."""
    if world_size < 1:
        raise ConfigError(f"--world-size {world_size} is not a number of ranks: use 1 or more")
    notes: list[str] = []
    ds_config = engine_config(
        read_json(run.deepspeed_config),
        run.deepspeed_config,
        recipe,
        world_size=world_size,
        per_device_batch=run.per_device_batch,
        nvme_path=run.nvme_path,
    )
    data = PackedDataset.open(run.data)
    if data.num_packs == 0:
        raise DataError(
            f"{data.path} holds no pack: run `ds-sft prepare` on input with usable rows"
        )
    note = presets.check_length(run.preset, data.max_seq_len, data.path, data.manifest)
    notes += [*([note] if note else []), *length_notes(run.recipe, data.max_seq_len)]
    model = find_model(recipe.model_id, run.allow_untested_architecture)
    if model is not None:
        notes += [*model.notes, *note_large_heads(run.attn_impl, model.head_sizes)]
    check_pair(data, model, recipe, notes)
    tokenizer_dir = check_tokenizers(run, data, model, notes)
    _check_generation_config(run, model)
    note_template(recipe, data, notes)
    recipe = recipe.resolved().replace(num_train_steps=final_steps(run, recipe, data.num_packs))
    _check_apollo(recipe, model)
    schedule = Schedule.from_recipe(recipe, data.num_packs)
    batches = _batches(run, recipe, data, schedule.num_steps, world_size)
    validation = open_validation(run, data, model, world_size)
    if run.out is not None:
        check_place(run.out, run.data, None if model is None else model.directory)
    swap_files.check(ds_config, model, world_size)
    if model is not None:
        warning = note_host_memory(
            run.deepspeed_config, ds_config, model, world_size,
            moments=low_rank.moments_of(model.shapes, recipe, world_size),
        )  # fmt: skip
        notes += [warning] if warning else []
    changes.check_fields(run.allow_change)
    point, broken = resume.find(run)
    if point is not None:
        notes += _check_resume(point, run, recipe, data, model, tokenizer_dir, world_size)
    if recipe.departures:
        notes.append(f"NOT LEVANTER'S CURVE: {', '.join(recipe.departures)}")
    _note_oddities(run, recipe, schedule, batches, model, notes)
    return Plan(
        run=run, recipe=recipe, data=data, schedule=schedule, batches=batches,
        validation=validation, ds_config=ds_config, model=model, tokenizer_dir=tokenizer_dir,
        resume_from=point, passed_over=list(broken.values()), notes=notes,
    )  # fmt: skip


def _batches(
    run: RunConfig, recipe: Recipe, data: PackedDataset, num_steps: int, world_size: int
) -> BatchPlan:
    """Packs by step and rank, in the recipe's order; each loss group has a target."""
    batches = BatchPlan(
        recipe,
        data.assistant_counts.tolist(),
        world_size=world_size,
        per_device_batch=run.per_device_batch,
        order=run_order(
            recipe.order,
            data.num_packs,
            num_steps * recipe.train_batch_size,
            recipe.data_seed,
            block_size=recipe.mixture_block_size,
            era_length=recipe.era_length,
        ),
        allow_idle=run.allow_idle,
    )
    batches.check_targets(num_steps)
    return batches


def final_steps(run: RunConfig, recipe: Recipe, num_packs: int) -> int:
    """Optimizer steps of the run: --epochs, else the recipe's, else eight epochs."""
    if not run.epochs:
        return recipe.steps(num_packs)
    # As a decimal: 0.1 epochs of 640 packs in batches of 64 is one step, not two.
    return max(1, math.ceil(Fraction(str(run.epochs)) * num_packs / recipe.train_batch_size))


def _check_apollo(recipe: Recipe, model: ModelFiles | None) -> None:
    """Refuse a rank that leaves nothing low-rank."""
    if recipe.apollo is not None and model is not None:
        low_rank.check(low_rank.by_name(model.shapes), recipe.apollo.rank)


def _check_generation_config(run: RunConfig, model: ModelFiles | None) -> None:
    if not run.keep_generation_config or model is None:
        return
    if not (model.directory / "generation_config.json").is_file():
        raise ConfigError(
            f"--keep-generation-config, but {model.directory} has no generation_config.json: "
            "drop the flag"
        )


def _check_resume(
    point: resume.ResumePoint,
    run: RunConfig,
    recipe: Recipe,
    data: PackedDataset,
    model: ModelFiles | None,
    tokenizer_dir: Path | None,
    world_size: int,
) -> list[str]:
    """What is said about going on from `point`; refuses one that belongs to something else."""
    changed = changes.check(
        point,
        recipe,
        world_size=world_size,
        now=changes.fingerprint(data.manifest_sha256, tokenizer_dir),
        model_config=None if model is None else model.config,
        allow_change=run.allow_change,
    )
    if point.completed > recipe.num_train_steps:
        raise ConfigError(
            f"{point.path} holds {point.completed} steps, more than the {recipe.num_train_steps} "
            "of this run: use a larger --num-train-steps, or another --out"
        )
    steps = f"{point.completed} of {recipe.num_train_steps} steps are done"
    return [f"goes on from {point.path}: {steps}", *changed]


def _note_oddities(
    run: RunConfig,
    recipe: Recipe,
    schedule: Schedule,
    batches: BatchPlan,
    model: ModelFiles | None,
    notes: list[str],
) -> None:
    steps = schedule.num_steps
    saved = set(cadence.labels(steps, recipe.steps_per_checkpoint))
    bare = [n for n in cadence.labels(steps, recipe.steps_per_hf_export) if n not in saved]
    if bare:
        notes.append(
            f"{len(bare)} exports have no native checkpoint of the same label "
            f"(first: step-{bare[0]})"
        )
    if batches.idle_slots:
        notes.append(
            f"{batches.idle_slots} of {batches.idle_slots + batches.batch_size} slots of a step "
            f"idle ({batches.idle_share:.0%}): a loss group of {batches.group_size} packs on "
            f"{batches.world_size} ranks x {batches.per_device_batch}"
        )
    if model is not None:
        share = low_rank.checkpoint_bytes(model.shapes, recipe) / batches.world_size / 1e9
        if share > SECONDS_AFTER_SIGTERM * ASSUMED_GB_PER_SECOND:
            notes.append(
                f"a checkpoint is {share:.0f} GB a rank, more than a launcher waits for after a "
                f"signal ({SECONDS_AFTER_SIGTERM} s, at an assumed {ASSUMED_GB_PER_SECOND} GB/s): "
                "stop with `touch <out>/stop`"
            )
    if run.stop_after >= steps:
        notes.append(f"--stop-after {run.stop_after} is not before the end at {steps} steps")
    if schedule.warmup_steps >= steps:
        notes.append(f"the warmup takes the whole run of {steps} steps: the peak is never reached")
