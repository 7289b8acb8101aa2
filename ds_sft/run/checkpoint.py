"""Native checkpoints: saving, loading and pruning, so that a directory is whole or not there.

Owns DeepSpeed's `save_checkpoint` and `load_checkpoint`, which are not crash-safe by themselves
(files in place, no fsync): everything goes into `step-N.partial`, meta.json last, then one rename.
Invariant: an existing checkpoint is never touched before its successor is whole. Leaves the choice
of a checkpoint to `resume`, reading one without an engine to `native`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_sft.errors import CheckpointError
from ds_sft.run.atomic import (
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    discard,
    fsync_path,
    partial_path,
    publish,
)
from ds_sft.run.layout import labels_in, step_dir
from ds_sft.run.resume import FORMAT, META_NAME, ResumePoint


def save(
    engine: Any,
    final: Path,
    *,
    meta: dict[str, Any],
    model_dir: Path,
    tokenizer_dir: Path,
    barrier: Callable[[], None],
) -> None:
    """Write the engine's state to `final`; every rank calls it, and returns when it is whole."""
    partial = partial_path(final)
    if dist.get_rank() == 0:
        discard(partial)
        partial.mkdir(parents=True)
    barrier()
    engine.save_checkpoint(str(final.parent), tag=partial.name, save_latest=False)
    for path in partial.glob(f"*zero_pp_rank_{dist.get_rank()}_*"):
        fsync_path(path)
    barrier()
    if dist.get_rank() == 0:
        _copy_model_files(model_dir, tokenizer_dir, partial / "model")
        (partial / META_NAME).write_text(json.dumps({"format": FORMAT, **meta}, indent=1))
        publish(partial, final)
    barrier()


def _copy_model_files(model_dir: Path, tokenizer_dir: Path, to: Path) -> None:
    """What an export needs besides the weights, so that a checkpoint is enough to make one."""
    to.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, to / name)
    shutil.copytree(tokenizer_dir, to / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))


def load(engine: Any, point: ResumePoint) -> None:
    """Bring the engine to the state in `point`; every rank calls it. Raises CheckpointError."""
    path, _ = engine.load_checkpoint(str(point.path.parent), tag=point.path.name)
    if path is None:
        raise CheckpointError(f"{point.path} could not be loaded: run ds-sft verify {point.path}")


def discard_leftovers(parent: Path) -> None:
    """Delete what a killed run was writing; rank 0 calls it once the run goes on.

    Its label may never come again, and an 8B model's checkpoint is 100 GB.
    """
    for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX):
        for path in parent.glob(f"step-*{suffix}"):
            # `publish` may have been killed between its two renames: the old one is the only one.
            if suffix == PARTIAL_SUFFIX or path.with_name(path.name.removesuffix(suffix)).exists():
                discard(path)


def prune(parent: Path, keep: int, needed: Callable[[int], bool]) -> None:
    """Delete all but the newest `keep` checkpoints (0 = none is deleted); rank 0 calls it.

    `needed(label)` protects one, for example because its export is still missing.
    """
    for label in labels_in(parent)[:-keep] if keep else []:
        if not needed(label):
            doomed = step_dir(parent, label)
            # Not whole from its first missing file on: the marker goes first.
            (doomed / META_NAME).unlink(missing_ok=True)
            shutil.rmtree(doomed, ignore_errors=True)


def drop_temporary(parent: Path, keep_label: int | None) -> None:
    """Delete the temporary checkpoints but `keep_label`, once a newer save is whole; rank 0."""
    for label in labels_in(parent):
        if label != keep_label:
            (step_dir(parent, label) / META_NAME).unlink(missing_ok=True)
            shutil.rmtree(step_dir(parent, label), ignore_errors=True)
