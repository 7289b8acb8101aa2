"""What a running engine writes into its run directory, and what it starts from.

Owns the policy: which checkpoints stay, when a temporary one goes, what happens to an export that
failed. Invariants: all ranks call every method at the same step; rank 0's clock and disk decide for
all; a checkpoint whose export is missing is never pruned. Leaves the writing to `checkpoint` and
`export`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_sft.data.model_files import ModelFiles
from ds_sft.data.packed import PackedDataset
from ds_sft.engine.build import say
from ds_sft.errors import CheckpointError, SavingFailed
from ds_sft.recipe import low_rank
from ds_sft.recipe.cadence import is_due, labels, timer_fired
from ds_sft.recipe.recipe import Recipe
from ds_sft.run import changes, checkpoint, manifest, numerics, reshard
from ds_sft.run.atomic import fsync_path
from ds_sft.run.export import RankZero, export_live
from ds_sft.run.health import Health
from ds_sft.run.hf_format import ExportSource, check_source
from ds_sft.run.layout import RunDir, labels_in, step_dir
from ds_sft.run.native import NativeCheckpoint
from ds_sft.run.proved_point import proved
from ds_sft.run.resume import ResumePoint
from ds_sft.run.rows import rows_in
from ds_sft.run_config import RunConfig

MAX_FAILURES = 3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
        self.health = Health(engine, run)
        self.is_main = dist.get_rank() == 0
        self.last_save = time.monotonic()
        self.saved = 0
        self.failures_in_a_row = 0
        self.export_interrupted = False  # by a wish to stop, on all ranks
        self.seconds_saving = 0.0
        # Gloo, beside the engine's own backend: its barrier waits on the CPU, for days if need be.
        self.patient = dist.new_group(backend="gloo", timeout=PATIENT_TIMEOUT)
        # For what ranks agree on between writes: a silent peer must not be waited for that long.
        prompt = timedelta(minutes=run.collective_timeout_minutes)
        self.prompt = dist.new_group(backend="gloo", timeout=prompt)
        generation_config = model.directory / "generation_config.json"
        self.source = ExportSource(
            config=model.config,
            tokenizer_dir=tokenizer_dir,
            generation_config=generation_config if run.keep_generation_config else None,
        )
        check_source(self.source)
        self.fingerprint = changes.fingerprint(data.manifest_sha256, tokenizer_dir)

    def barrier(self) -> None:
        """Wait for all ranks, for as long as it takes one of them to write."""
        dist.barrier(group=self.patient)

    def resume(
        self, point: ResumePoint | None, interrupted: Callable[[], bool] = lambda: False
    ) -> int:
        """Load the checkpoint, if there is one; returns the number of completed steps.

        Makes up a missing export of it, unless `interrupted`. Raises CheckpointError when the run
        directory cannot be prepared for writing.
        """
        first = 0
        point = proved(point, self.run, self.engine.device, self._check)
        if point is not None:
            reshard.load(self.engine, NativeCheckpoint.open(point.path))
            first = self.saved = point.completed
            self.health.dropped, self.health.in_a_row = point.meta.get("dropped_updates", (0, 0))
            say(f"[init] resumed from {point.path} at step {first}")
        what = f"{self.dir.root} cannot be prepared"
        RankZero(self.barrier, self.engine.device, what).run(lambda: self._prepare(first))
        if first and self._on_rank_zero(lambda: self._export_missing(first - 1)):
            self.export(first - 1, interrupted)  # a stop interrupted it, or it failed
        return first

    def _prepare(self, first: int) -> None:
        """Clear away what a killed run left, and record this start; on rank 0."""
        for parent in (self.dir.checkpoints, self.dir.exports):
            parent.mkdir(parents=True, exist_ok=True)
        for parent in (self.dir.checkpoints, self.dir.temporary, self.dir.exports):
            checkpoint.discard_leftovers(parent)
        self.dir.finished.unlink(missing_ok=True)
        manifest.write_run_json(
            self.dir, self.run, self.recipe, self.ds_config, self.data, self.model,
            self.source.tokenizer_dir, world_size=dist.get_world_size(), first_step=first,
        )  # fmt: skip

    def _on_rank_zero(self, decide: Callable[[], bool]) -> bool:
        """Rank 0's answer, on every rank."""
        box = [self.is_main and decide()]
        dist.broadcast_object_list(box, src=0, device=self.engine.device)
        return box[0]

    def _check(self, point: ResumePoint) -> None:
        changes.check(
            point, self.recipe, world_size=dist.get_world_size(),
            now=self.fingerprint, model_config=self.model.config,
            allow_change=self.run.allow_change,
        )  # fmt: skip

    def timer_fired(self) -> bool:
        """Whether a temporary checkpoint is due, by this process' clock."""
        return timer_fired(time.monotonic(), self.last_save, self.run.temp_checkpoint_minutes)

    def checkpoint(self, label: int, *, temporary: bool) -> None:
        """Save a native checkpoint, then delete what it replaces.

        A failure is said and tried again at the next due moment, since the run itself is healthy;
        the third in a row raises SavingFailed. Raises TrainingDiverged for weights that are not
        finite: a checkpoint of them would push out the last good one.
        """
        self.health.require_finite_weights(label)
        self._keep_rows()
        parent = self.dir.temporary if temporary else self.dir.checkpoints
        final = step_dir(parent, label)
        started = time.monotonic()
        try:
            needed = low_rank.checkpoint_bytes(self.model.shapes, self.recipe)
            self._require_space(parent, needed)
            size = checkpoint.save(
                self.engine, final, meta=self._meta(label, temporary=temporary),
                model_dir=self.model.directory, tokenizer_dir=self.source.tokenizer_dir,
                barrier=self.barrier,
            )  # fmt: skip
        except CheckpointError as error:
            self.failures_in_a_row += 1
            self.last_save = time.monotonic()  # the timer's next moment is its whole time away
            if self.failures_in_a_row == MAX_FAILURES:
                raise SavingFailed(
                    f"{MAX_FAILURES} checkpoints in a row failed, the last because: {error}: make "
                    "room and start again; the newest whole checkpoint is kept"
                ) from error
            say(f"[checkpoint] FAILED: {error}; the training goes on and tries again")
            return
        self.failures_in_a_row, self.saved = 0, label + 1
        self.last_save = time.monotonic()
        if self.is_main:
            checkpoint.drop_temporary(self.dir.temporary, label if temporary else None)
            checkpoint.prune(self.dir.checkpoints, self.run.keep_checkpoints, self._export_missing)
        self._account("checkpoint", final, size, started)

    def _keep_rows(self) -> None:
        """Bring metrics.jsonl to disk: a checkpoint that outlives its rows would leave a hole."""
        with contextlib.suppress(OSError):
            if self.is_main and self.dir.metrics.exists():
                fsync_path(self.dir.metrics)

    def _meta(self, label: int, *, temporary: bool) -> dict[str, Any]:
        return {
            "label": label,
            "completed": label + 1,
            "world_size": dist.get_world_size(),
            "compute_dtype": self.recipe.compute_dtype,
            "data_manifest_sha256": self.data.manifest_sha256,
            "fingerprint": self.fingerprint,
            "versions": changes.package_versions(),
            "recipe": dataclasses.asdict(self.recipe),
            "model": {"config.json": self.model.config},
            "tokenizer_source": str(self.source.tokenizer_dir),
            "temporary": temporary,
            "dropped_updates": (self.health.dropped, self.health.in_a_row),
        }

    def before_stopping(self, completed: int) -> None:
        """Save the last completed step, unless nothing happened since the last save."""
        if completed > self.saved:
            self.checkpoint(completed - 1, temporary=True)
        self.require_saved(completed)

    def require_saved(self, completed: int) -> None:
        """Raise SavingFailed unless the newest step is in a checkpoint: there is no next moment."""
        if completed > self.saved:
            raise SavingFailed(
                f"the state after {completed} steps could not be saved: make room and start again, "
                f"it goes on after {self.saved} steps"
            )

    def _require_space(self, parent: Path, needed: int) -> None:
        """Raise CheckpointError on every rank unless rank 0 finds `needed` bytes for `parent`."""
        problem: list[str] = [""]
        if self.is_main:
            try:
                # Of where a link leads; temporary checkpoints make their directory when they come.
                free = shutil.disk_usage(parent if parent.exists() else self.dir.root).free
                if free < needed:
                    left = f"{gigabytes(free)} free, {gigabytes(needed)} are needed"
                    problem = [f"{parent} has {left}"]
            except OSError as error:
                problem = [f"{parent} cannot be looked at: {error.strerror}"]
        dist.broadcast_object_list(problem, src=0, device=self.engine.device)
        if problem[0]:
            raise CheckpointError(problem[0])

    def _account(self, kind: str, path: Path, size: int, started: float) -> None:
        seconds = time.monotonic() - started
        self.seconds_saving += seconds
        speed = size / 1e6 / max(seconds, 1e-9)
        cost = f"{seconds:.1f} s ({gigabytes(size)}, {speed:.0f} MB/s)"
        if kind == "export":  # a line of its own, which log readers know word for word
            say(f"[export] wrote {path}")
            self._say_numerics(path)
            say(f"[time] the export took {cost}")
        else:
            say(f"[checkpoint] wrote {path} in {cost}")

    def _say_numerics(self, export: Path) -> None:
        """A line about the weights that were written; a file system's trouble is only said."""
        if self.is_main:
            try:
                print(f"[numerics] {numerics.summary(export)}", flush=True)
            except CheckpointError as error:
                print(f"[numerics] {error}", flush=True)

    def _export_missing(self, label: int) -> bool:
        """Whether `label` should have an export and has none."""
        due = is_due(label, self.recipe.num_train_steps, self.recipe.steps_per_hf_export)
        return due and label not in labels_in(self.dir.exports)

    def export(self, label: int, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Write hf/step-<label>; a failure is reported and does not end the run.

        `interrupted` is asked on all ranks before each tensor, with the same answer.
        """
        out = step_dir(self.dir.exports, label)
        started = time.monotonic()

        def asked() -> bool:
            self.export_interrupted = interrupted()
            return self.export_interrupted

        try:
            size = self.model.num_parameters * BYTES[self.run.hf_export_dtype]
            self._require_space(self.dir.exports, size)
            export_live(
                self.engine, out, dtype=self.run.hf_export_dtype, source=self.source,
                barrier=self.barrier, interrupted=asked,
            )  # fmt: skip
        except CheckpointError as error:
            goes_on = "" if self.export_interrupted else "; the training goes on"
            say(f"[export] FAILED: {error}{goes_on}")
            return
        self._account("export", out, size, started)

    def report_time(self, seconds: float) -> None:
        """Time lost to saving in this part of the run."""
        share = self.seconds_saving / max(seconds, 1e-9)
        say(f"[time] saving and exporting took {self.seconds_saving:.1f} s, {share:.1%} of the run")

    def report_missing(self) -> None:
        """The exports that are missing, with the command for each."""
        if not self.is_main:
            return
        exported, saved = labels_in(self.dir.exports), labels_in(self.dir.checkpoints)
        steps, every = self.recipe.num_train_steps, self.recipe.steps_per_hf_export
        rows = rows_in(self.dir.metrics) if self.dir.metrics.is_file() else []
        began = min((row["label"] for row in rows), default=0)
        for label in labels(steps, every):
            # Before its first row this run is a branch of another, whose exports those are.
            if label in exported or label < began:
                continue
            out = step_dir(self.dir.exports, label)
            source = step_dir(self.dir.checkpoints, label)
            how = f"ds-sft export --checkpoint {source} --out {out}"
            how = how if label in saved else "its checkpoint is gone too"
            print(f"[export] {out} is missing: {how}", flush=True)


def gigabytes(size: int) -> str:
    """Bytes as GB of 1e9, or as MB where that would read 0.00."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
