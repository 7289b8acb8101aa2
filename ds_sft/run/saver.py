"""What a running engine writes into its run directory, and what it starts from.

Owns the policy: which checkpoints stay, when a temporary one goes, what happens to an export that
failed. Invariants: all ranks call every method at the same step; rank 0's clock and disk decide for
all; a checkpoint whose export is missing is never pruned. Leaves the writing to `checkpoint` and
`export`.
"""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_sft.data.model_files import ModelFiles
from ds_sft.data.packed import PackedDataset
from ds_sft.engine.build import say
from ds_sft.engine.config import optimizer_layout
from ds_sft.errors import CheckpointError
from ds_sft.flags import RunConfig
from ds_sft.recipe.cadence import is_due, timer_fired
from ds_sft.recipe.recipe import Recipe
from ds_sft.run import checkpoint, manifest
from ds_sft.run.export import export_live
from ds_sft.run.hf_format import ExportSource, check_source
from ds_sft.run.layout import RunDir, labels_in, step_dir
from ds_sft.run.resume import ResumePoint

PATIENT_TIMEOUT = timedelta(days=2)  # a rank may write that long while the others wait


class Saver:
    """Saves and exports of one run."""

    def __init__(
        self,
        engine: Any,
        run: RunConfig,
        recipe: Recipe,
        ds_config: dict[str, Any],
        data: PackedDataset,
        model: ModelFiles,
        tokenizer_dir: Path,
    ) -> None:
        """Raises CheckpointError if the exports of this run could not be made."""
        self.engine, self.run, self.recipe, self.data, self.model = engine, run, recipe, data, model
        self.ds_config = ds_config
        self.dir = RunDir(run.run_dir)
        self.is_main = dist.get_rank() == 0
        self.last_save = time.monotonic()
        self.failed_exports: list[int] = []
        # Gloo, beside the engine's own backend: its barrier waits on the CPU, for days if need be.
        self._patient = dist.new_group(backend="gloo", timeout=PATIENT_TIMEOUT)
        generation_config = model.directory / "generation_config.json"
        self.source = ExportSource(
            config=model.config,
            tokenizer_dir=tokenizer_dir,
            generation_config=generation_config if run.keep_generation_config else None,
        )
        check_source(self.source)

    def barrier(self) -> None:
        """Wait for all ranks, for as long as it takes one of them to write."""
        dist.barrier(group=self._patient)

    def resume(self, point: ResumePoint | None) -> int:
        """Load the checkpoint, if there is one; returns the number of completed steps."""
        first = 0
        if point is not None:
            checkpoint.load(self.engine, point)
            first = point.completed
            say(f"[init] resumed from {point.path} at step {first}")
        if self.is_main:
            for parent in (self.dir.checkpoints, self.dir.exports):
                parent.mkdir(parents=True, exist_ok=True)
            for parent in (self.dir.checkpoints, self.dir.temporary, self.dir.exports):
                checkpoint.discard_leftovers(parent)
            self.dir.finished.unlink(missing_ok=True)
            manifest.write_run_json(
                self.dir, self.run, self.recipe, self.ds_config, self.data,
                world_size=dist.get_world_size(), first_step=first,
            )  # fmt: skip
        self.barrier()
        return first

    def timer_fired(self) -> bool:
        """Whether a temporary checkpoint is due, by this process' clock."""
        return timer_fired(time.monotonic(), self.last_save, self.run.temp_checkpoint_minutes)

    def checkpoint(self, label: int, *, temporary: bool) -> None:
        """Save a native checkpoint, then delete what it replaces."""
        started = time.monotonic()
        parent = self.dir.temporary if temporary else self.dir.checkpoints
        final = step_dir(parent, label)
        meta = {
            "label": label,
            "completed": label + 1,
            "world_size": dist.get_world_size(),
            "compute_dtype": self.recipe.compute_dtype,
            "optimizer_layout": optimizer_layout(self.ds_config),
            "data_manifest_sha256": self.data.manifest_sha256,
            "recipe": dataclasses.asdict(self.recipe),
            "model": {"config.json": self.model.config},
            "tokenizer_source": str(self.source.tokenizer_dir),
            "temporary": temporary,
        }
        checkpoint.save(
            self.engine, final, meta=meta, model_dir=self.model.directory,
            tokenizer_dir=self.source.tokenizer_dir, barrier=self.barrier,
        )  # fmt: skip
        self.last_save = time.monotonic()
        if self.is_main:
            checkpoint.drop_temporary(self.dir.temporary, label if temporary else None)
            checkpoint.prune(self.dir.checkpoints, self.run.keep_checkpoints, self._export_missing)
        say(f"[checkpoint] wrote {final} in {self.last_save - started:.1f} s")

    def _export_missing(self, label: int) -> bool:
        """Whether `label` should have an export and has none."""
        due = is_due(label, self.recipe.num_train_steps, self.recipe.steps_per_hf_export)
        return due and label not in labels_in(self.dir.exports)

    def export(self, label: int) -> None:
        """Write hf/step-<label>; a failure is reported, kept in mind, and does not end the run."""
        out = step_dir(self.dir.exports, label)
        try:
            export_live(
                self.engine, out, dtype=self.run.hf_export_dtype, source=self.source,
                barrier=self.barrier,
            )  # fmt: skip
        except CheckpointError as error:
            self.failed_exports.append(label)
            say(f"[export] FAILED: {error}; the training goes on")

    def report_failures(self) -> None:
        """Say which exports are missing, and the command that makes each."""
        for label in self.failed_exports:
            out = step_dir(self.dir.exports, label)
            source = step_dir(self.dir.checkpoints, label)
            say(f"[export] missing: ds-sft export --checkpoint {source} --out {out}")
