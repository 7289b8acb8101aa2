"""The checkpoint that all ranks go on from: its files have the hashes that were written.

Owns the walk from the newest checkpoint to older ones once there is a process group: every rank
hashes its share, rank 0 sets aside what is not whole. Invariants: all ranks take the same
checkpoint or raise the same error; one that was not the first choice is held against the run too.
Leaves sizes and markers to `resume`, loading to `reshard`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_sft.engine.build import say
from ds_sft.errors import CheckpointError
from ds_sft.run import resume
from ds_sft.run.resume import ResumePoint
from ds_sft.run.seal import check_hashes
from ds_sft.run_config import RunConfig

Check = Callable[[ResumePoint], object]


def proved(
    point: ResumePoint | None, run: RunConfig, device: torch.device, check: Check
) -> ResumePoint | None:
    """`point`, or the newest one before it whose files have the hashes of their marker.

    Every rank calls it. What is not whole is set aside, so that it is neither taken nor counted
    again. `check` raises for a checkpoint of another run. Raises CheckpointError when none is left.
    """
    if point is None:
        return None
    if run.resume == "auto":
        _agreed(functools.partial(_set_aside_broken, run), device)
    while run.verify_on_resume == "hash":
        started = time.monotonic()
        problem = hash_problem(point)
        if problem is None:
            say(f"[init] {point.path} is whole ({time.monotonic() - started:.1f} s of hashing)")
            break
        if run.resume != "auto":
            raise CheckpointError(f"{point.path} is not whole: {problem}")
        point = _agreed(functools.partial(_next_point, point, problem, run), device)
        check(point)
    return point


def hash_problem(point: ResumePoint) -> str | None:
    """What is wrong with the files of `point`; every rank reads its share of them."""
    problem = None
    try:
        files = point.meta.get("files", {})
        check_hashes(point.path, files, dist.get_rank(), dist.get_world_size())
    except CheckpointError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((p for p in problems if p), None)


def _agreed(work: Callable[[], Any], device: torch.device) -> Any:
    """What `work` returns on rank 0, on every rank; or the CheckpointError that it raises there."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except CheckpointError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, device=device)
    if box[1] is not None:
        raise CheckpointError(box[1])
    return box[0]


def _set_aside_broken(run: RunConfig) -> ResumePoint | None:
    """Move away what is not whole by its sizes; returns what is to be gone on from."""
    found, broken = resume.find(run)
    for path, reason in broken.items():
        print(f"[init] passed over, now {resume.set_aside(path)}: {reason}", flush=True)
    return found


def _next_point(point: ResumePoint, problem: str, run: RunConfig) -> ResumePoint | None:
    """The next older checkpoint. Raises CheckpointError when none is left."""
    print(f"[init] passed over, now {resume.set_aside(point.path)}: {problem}", flush=True)
    return _set_aside_broken(run)
