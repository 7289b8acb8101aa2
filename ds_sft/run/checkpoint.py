"""Native checkpoints: saving, loading and pruning, so that a directory is whole or not there.

Owns DeepSpeed's `save_checkpoint`, which is not crash-safe by itself (files in place, no fsync):
everything goes into `step-N.partial`, meta.json last, then one rename. Invariant: an existing
checkpoint is never touched before its successor is whole. Leaves the choice of a checkpoint to
`resume`, loading to `reshard`, reading one without an engine to `native`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_sft.data.sealed import sealed_json
from ds_sft.errors import CheckpointError
from ds_sft.run.atomic import (
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    bring_back,
    discard,
    fsync_path,
    partial_path,
    publish,
)
from ds_sft.run.export import Barrier, RankZero
from ds_sft.run.layout import labels_in, step_dir
from ds_sft.run.marker import FORMAT, META_NAME
from ds_sft.run.seal import Files, names_in, seal
from ds_sft.run.swapped import no_copy_of_swap_files, with_swapped


def save(
    engine: Any,
    final: Path,
    *,
    meta: dict[str, Any],
    model_dir: Path,
    tokenizer_dir: Path,
    barrier: Barrier,
) -> int:
    """Write the engine's state to `final`; every rank calls it. Returns its size in bytes.

    Raises CheckpointError on every rank when any of them cannot write; then nothing is left.
    """
    partial = partial_path(final)
    on_rank_zero = RankZero(barrier, engine.device, f"the checkpoint {final} failed")
    files: Files = {}

    def begin() -> None:
        discard(partial)
        partial.mkdir(parents=True)

    def finish() -> None:
        _copy_model_files(model_dir, tokenizer_dir, partial / "model")
        # Not the file's: of a multimodal model only the text part was trained.
        config = json.dumps(meta["model"]["config.json"], indent=2) + "\n"
        (partial / "model" / "config.json").write_text(config, encoding="utf-8")
        files.update(seal(partial, [f"model/{name}" for name in names_in(partial / "model")]))
        text = sealed_json({"format": FORMAT, **meta, "files": files})
        (partial / META_NAME).write_text(text, encoding="utf-8")
        publish(partial, final)

    try:
        on_rank_zero.run(begin)
        files.update(_write_states(engine, partial))
        on_rank_zero.run(finish)
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(size for size, _ in files.values())


def _write_states(engine: Any, partial: Path) -> Files:
    """DeepSpeed's files of every rank, on disk and hashed by the rank that wrote them."""
    problems: list[str] = []
    write = engine.checkpoint_engine.save

    def write_or_note(state_dict: dict[str, Any], path: str) -> Any:
        # Raising here would leave the other ranks in DeepSpeed's own barrier.
        try:
            return write(with_swapped(engine.optimizer, state_dict), path)
        except Exception as error:
            problems.append((str(error) or type(error).__name__).splitlines()[0])

    engine.checkpoint_engine.save = write_or_note
    # `ds-sft export` replaces its conversion scripts, and rank 0 could fail alone in copying them.
    engine._copy_recovery_script = lambda save_path: None
    try:
        with no_copy_of_swap_files(engine):
            engine.save_checkpoint(str(partial.parent), tag=partial.name, save_latest=False)
    finally:
        engine.checkpoint_engine.save = write
    mine: Files = {}
    if not problems:
        try:
            names = [p.name for p in partial.glob(f"*zero_pp_rank_{dist.get_rank()}_*")]
            for name in names:
                fsync_path(partial / name)
            mine = seal(partial, names)
        except (OSError, CheckpointError) as error:
            problems.append(str(error))
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (problems, mine))
    for rank, (failed, _) in enumerate(everything):
        if failed:
            raise CheckpointError(f"the checkpoint {partial} failed on rank {rank}: {failed[0]}")
    return {name: entry for _, part in everything for name, entry in part.items()}


def _copy_model_files(model_dir: Path, tokenizer_dir: Path, to: Path) -> None:
    """What an export needs besides the weights, so that a checkpoint is enough to make one."""
    to.mkdir()
    if (model_dir / "generation_config.json").is_file():
        shutil.copyfile(model_dir / "generation_config.json", to / "generation_config.json")
    shutil.copytree(tokenizer_dir, to / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))


def discard_leftovers(parent: Path) -> None:
    """Delete what a killed run was writing or deleting; rank 0 calls it once the run goes on.

    Its label may never come again, and an 8B model's checkpoint is 100 GB. What `publish` had
    renamed away without putting the new one in its place is the only one of its label: it returns.
    """
    for path in parent.glob(f"step-*{REPLACED_SUFFIX}"):
        bring_back(path)
    for path in parent.glob(f"step-*{PARTIAL_SUFFIX}"):
        discard(path)


def prune(parent: Path, keep: int, needed: Callable[[int], bool]) -> None:
    """Delete all but the newest `keep` checkpoints (0 = none is deleted); rank 0 calls it.

    `needed(label)` protects one, for example because its export is still missing.
    """
    for label in labels_in(parent)[:-keep] if keep else []:
        if not needed(label):
            _delete(step_dir(parent, label))


def drop_temporary(parent: Path, keep_label: int | None) -> None:
    """Delete the temporary checkpoints but `keep_label`, once a newer save is whole; rank 0."""
    for label in labels_in(parent):
        if label != keep_label:
            _delete(step_dir(parent, label))


def _delete(doomed: Path) -> None:
    """Delete a checkpoint. It loses its name first: what a kill leaves is a `.partial`, no half.

    A healthy run goes on when that fails; the directory is said and stays.
    """
    try:
        discard(partial_path(doomed))
        discard(doomed.rename(partial_path(doomed)))
    except OSError as error:
        print(f"[checkpoint] {doomed} cannot be deleted: {error}", flush=True)
