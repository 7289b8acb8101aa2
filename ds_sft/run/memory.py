"""When memory does not suffice: one line that says what was measured and what to try.

Owns the budget of a run and the form of out-of-memory errors. Invariants: all ranks end a run over
its budget at the same step, with the last completed one saved; the rank whose allocation failed is
the one that speaks. Leaves the measuring to `engine.used_memory`, what would fit to `ds-sft fit`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ds_sft import plan_memory
from ds_sft.engine import placement, used_memory
from ds_sft.errors import OutOfMemory
from ds_sft.plan import Plan
from ds_sft.run_config import RunConfig

_SMALL = 10_000_000  # bytes that no breakdown names
_NAMES = {"gpu": "GPU", "host": "host", "cuda": "GPU or page-locked host"}


def over_budget(run: RunConfig) -> bool:
    """Whether this rank's peak exceeds the budget by more than a tenth."""
    budget = run.memory_budget_gb
    return budget > 0 and used_memory.peak_memory_gb() > plan_memory.BUDGET_TOLERANCE * budget


def budget_error(plan: Plan) -> OutOfMemory:
    """The error that ends a run over its budget; every rank calls it."""
    peaks: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, used_memory.peak_memory_gb())
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    budget = plan.run.memory_budget_gb
    most = plan_memory.BUDGET_TOLERANCE * budget
    return OutOfMemory(
        f"the peak memory of rank {worst} is {peaks[worst]:.2f} GB, more than --memory-budget-gb "
        f"{budget:g} and a tenth ({most:.2f} GB): {what_to_try(plan, _short())}"
    )


@contextlib.contextmanager
def in_one_line(plan: Plan) -> Iterator[None]:
    """Turn an allocation that failed in here into OutOfMemory; any rank prints its own line."""
    try:
        yield
    except Exception as error:
        short = used_memory.ran_out(error)
        if not short:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0].strip()[:200].rstrip(".")
        message = (
            f"out of {_NAMES[short]} memory: {used_memory.measured()} ({reason}): "
            f"{what_to_try(plan, short)}"
        )
        rank = os.environ.get("RANK", "0")
        if rank != "0":  # whose errors nobody else prints
            where = f"rank {rank} on host {socket.gethostname()}"
            print(f"error: {where}: {message}", file=sys.stderr, flush=True)
        raise OutOfMemory(message) from error


def what_to_try(plan: Plan, short: str) -> str:
    """What was predicted, the next smaller setting, and the command that lists what fits.

    `short` is what `used_memory.ran_out` says.
    """
    run = plan.run
    ways = []
    if run.per_device_batch > 1:
        ways.append(f"--per-device-batch {run.per_device_batch // 2}")
    pinned = "cpu" in placement.devices(plan.ds_config)
    which: placement.Memory = "host" if short == "host" or (short == "cuda" and pinned) else "gpu"
    swaps = plan.recipe.apollo is None
    following = placement.next_json(run.deepspeed_config, plan.ds_config, which, swaps)
    if following is not None:
        ways.append(f"--deepspeed-config {following}")
    if not ways:
        ways.append("more GPUs, or data with a shorter --max-seq-len")
    fit = ["ds-sft", "fit", "--model-id", plan.recipe.model_id]
    fit += ["--max-seq-len", str(plan.data.max_seq_len)]
    fit += ["--world-size", str(plan.batches.world_size)]
    if plan.recipe.apollo is not None:
        fit += ["--optimizer", plan.recipe.optimizer]
        fit += ["--apollo-rank", str(plan.recipe.apollo.rank)]
    return f"{predicted(plan)}try {', then '.join(ways)}; `{shlex.join(fit)}` lists what fits"


def predicted(plan: Plan) -> str:
    """The breakdown of `plan --memory` as part of a line; empty where it cannot be made.

    It takes some seconds. Whatever goes wrong in it must not hide what was measured.
    """
    try:
        said = plan_memory.facts(plan)
        gpu, host = said["gpu"], said["host"]
        parts = [(n, v) for n, v in gpu.items() if n not in ("phase", "total") and v >= _SMALL]
        sizes = ", ".join(f"{name} {_gb(size)}" for name, size in parts)
        return (
            f"predicted were {_gb(gpu['total'])} a GPU in the {gpu['phase']} ({sizes}) and "
            f"{_gb(host['total'])} of host memory a node; "
        )
    except Exception:
        return ""


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _short() -> str:
    return "gpu" if torch.cuda.is_available() else "host"
