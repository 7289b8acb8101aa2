"""Where a run goes on: the newest checkpoint that is whole by its marker. No torch.

Owns the choice of the checkpoint. Leaves the comparison with what was asked for to `changes`, the
hashes of its files to `seal`, loading to `reshard`.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft.errors import CheckpointError, ConfigError
from ds_sft.run.atomic import REPLACED_SUFFIX
from ds_sft.run.layout import RunDir, checkpoints_in
from ds_sft.run.marker import read_finished, read_meta
from ds_sft.run.seal import check_listed, check_sizes
from ds_sft.run_config import RunConfig

BROKEN_SUFFIX = ".broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint that this run may go on from."""

    path: Path
    """Its `step-N` directory."""
    completed: int
    """Optimizer steps that it holds."""
    meta: dict[str, Any]
    """Its meta.json."""
    is_end: bool = False
    """Whether the run directory is finished and this is its last step: nothing computes from it
    unless the run is made longer."""


def find(run: RunConfig) -> tuple[ResumePoint | None, dict[Path, str]]:
    """The checkpoint that `--resume` means, and the newer ones that are not whole, with reasons.

    The point is None for a fresh start.
    Raises CheckpointError for a path without a whole checkpoint, or when there are checkpoints, or
    were some before they were set aside, and none is whole; ConfigError for `none` on a directory
    that holds a run, and for a path when that directory holds something newer.
    """
    hashed = run.verify_on_resume == "hash"
    points, broken = _points(run.out, hashed)
    newest = points[0] if points else None
    finished = None if run.out is None else read_finished(RunDir(run.out))
    if broken and not points and run.resume == "auto" and finished is None:
        raise CheckpointError(
            f"{run.out} holds {len(broken)} checkpoints and none is whole "
            f"({next(iter(broken.values()))}): bring one back from a copy, or use another --out"
        )
    if run.resume == "auto" and not points and (aside := _aside(run.out)):
        # A second start would otherwise begin at step 0, and drop the rows of metrics.jsonl.
        raise CheckpointError(
            f"no whole checkpoint is left in {run.out}, only what was set aside ({aside[-1]}): "
            "bring one back from a copy, or use another --out"
        )
    if run.resume not in ("auto", "none"):
        point = read_point(Path(run.resume), hashed)
        if newest is not None and newest.completed > point.completed:
            # They would win at the next start, and push what this run saves out of the directory.
            raise ConfigError(
                f"--resume {run.resume} goes back to {point.completed} steps, but {newest.path} "
                "is newer: use --resume auto to go on from that one, or another --out to branch off"
            )
        return point, {}
    if (points or broken) and run.resume == "none":
        raise ConfigError(
            f"--resume none, but {run.out} holds a run with checkpoints: "
            "use another --out, or --resume auto to go on"
        )
    if newest is not None and newest.completed == finished:
        newest = dataclasses.replace(newest, is_end=True)
    return newest, broken


def _points(out: Path | None, hashed: bool) -> tuple[list[ResumePoint], dict[Path, str]]:
    """Checkpoints of a run directory that are whole by their sizes, the newest first.

    Besides, each one that is not and that is newer than all which are, with the reason. Raises
    PermissionError where this user may not read a newer one: to go on from an older would lose it.
    """
    if out is None:
        return [], {}
    found = [
        (label, path)
        for parent in (RunDir(out).checkpoints, RunDir(out).temporary)
        for label, path in checkpoints_in(parent, REPLACED_SUFFIX).items()
    ]
    points: list[ResumePoint] = []
    broken: dict[Path, str] = {}
    for _, path in sorted(found, reverse=True):
        try:
            points.append(read_point(path, hashed))
        except CheckpointError as error:
            if not points:
                broken[path] = str(error)
        except PermissionError:
            if not points:
                raise
    return points, broken


def _aside(out: Path | None) -> list[Path]:
    """What `set_aside` has renamed in a run that still needs a checkpoint, by name."""
    if out is None or RunDir(out).finished.is_file():
        return []
    parents = (RunDir(out).checkpoints, RunDir(out).temporary)
    return sorted(path for p in parents for path in p.glob(f"step-*{BROKEN_SUFFIX}"))


def read_point(path: Path, hashed: bool) -> ResumePoint:
    """The checkpoint in `path`. Raises CheckpointError unless it is whole by its marker.

    Where hashes are to be compared (`hashed`), every rank's file must be listed with one.
    """
    meta = read_meta(path)
    name = re.fullmatch(r"step-(\d+)", path.name)
    if name and int(name[1]) != meta["completed"] - 1:
        # The name decides which checkpoint is the newest: a copy under another one would win.
        raise CheckpointError(
            f"{path} holds label {meta['completed'] - 1}: rename it to step-{meta['completed'] - 1}"
        )
    files = meta.get("files", {})
    check_sizes(path, files)
    if hashed:
        check_listed(path, files)
    return ResumePoint(path=path, completed=meta["completed"], meta=meta)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is not whole, so that nothing takes, counts or prunes it.

    Raises CheckpointError where the directory cannot be changed.
    """
    aside = path.with_name(path.name + BROKEN_SUFFIX)
    try:
        if aside.exists():
            shutil.rmtree(aside)
        return path.rename(aside)
    except OSError as error:
        raise CheckpointError(
            f"{path} is not whole and cannot be set aside ({error}): move it away"
        ) from None
