"""What this host gives to its ranks: accelerator, cores, memory, and a container's limits on them.

Owns the reading of cgroups (both versions) and the number of OpenMP threads of a rank. Invariants:
a limit is the tightest of the host's and of every group around this process; the threads are set
before torch starts, since it reads them once. Leaves what a run needs to its callers. Imports torch
only to look for CUDA, where somebody asks for it by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ds_sft.errors import ConfigError

GPUS_OF_A_HOST = 8  # assumed by a plan; a launched run knows
_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# Without a limit, version 1 says the largest multiple of a page below 2^63.
_NO_LIMIT = 2**60


def accelerator_problem() -> str:
    """Why the accelerator that DS_ACCELERATOR names cannot be had; empty when it can."""
    asked = os.environ.get("DS_ACCELERATOR", "")
    if asked not in ("", "cpu", "cuda"):
        return f"DS_ACCELERATOR={asked}, but ds_sft knows cuda and cpu"
    if asked != "cuda":
        return ""
    import torch

    return "" if torch.cuda.is_available() else "DS_ACCELERATOR=cuda, but no CUDA device is seen"


def check_accelerator() -> None:
    """Raise ConfigError where DeepSpeed would end with a traceback: DS_ACCELERATOR is no good."""
    problem = accelerator_problem()
    if problem:
        raise ConfigError(f"{problem}: unset it")


def local_ranks(world_size: int) -> int:
    """Ranks of this host: what the launcher says (DeepSpeed's, torchrun), else up to 8."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(said) if said else min(world_size, GPUS_OF_A_HOST)


def cores() -> int:
    """CPU cores that this process may use: its affinity mask and its container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quotas = [q for q in map(_quota, _group_directories("cpu")) if q]
    return max(1, min([allowed, *quotas]))


def memory_total() -> int:
    """Bytes of memory of the host."""
    for line in (_PROC / "meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel names MemTotal in /proc/meminfo")


def memory_limit() -> tuple[int, str]:
    """Bytes of memory that the processes of this container may hold, and who says so."""
    total = memory_total()
    limits = [limit for d in _group_directories("memory") if (limit := _memory_of(d))]
    least = min(limits, default=total)
    return (least, "container") if least < total else (total, "host")


def set_threads(environ: dict[str, str] | None = None) -> str:
    """Give each rank of this host an equal share of its cores; returns the choice in words.

    A number that the person or the launcher has set stays. Without one every rank would take all
    cores, and ranks that fight for cores are several times slower (DeepSpeed's launcher sets
    none; torchrun sets 1, with which CPU Adam crawls). A rank that its launcher has bound to cores
    of its own (`--bind_cores_to_rank`) takes all of those. Call it before torch is imported.
    """
    env = os.environ if environ is None else environ
    ranks = int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or 1)
    have = cores()
    if ranks > 1 and _is_bound():
        share, place = have, f"bound to {have} core{'s' if have > 1 else ''} of its own"
    else:
        share = max(1, have // ranks)
        place = f"{have} cores for {ranks} rank{'s' if ranks > 1 else ''} of this host"
    given = env.get("OMP_NUM_THREADS", "")
    if not given:
        env["OMP_NUM_THREADS"] = str(share)
        return f"{_threads(share)} a rank ({place})"
    text = f"{_threads(given)} a rank (OMP_NUM_THREADS; {place})"
    if given.isdecimal() and int(given) < share:
        text += f": CPU Adam is faster with OMP_NUM_THREADS={share}"
    if given.isdecimal() and int(given) > share:
        text += f": more than there are, use OMP_NUM_THREADS={share}"
    return text


def _is_bound() -> bool:
    """Whether this process may use fewer cores than the launcher that started it."""
    try:
        return len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(os.getppid()))
    except OSError:  # the launcher is gone, or another user's
        return False


def _threads(number: int | str) -> str:
    return f"{number} OMP thread{'' if str(number) == '1' else 's'}"


def _group_directories(controller: str) -> Iterator[Path]:
    """The cgroups around this process that the named controller limits, of both versions.

    Inside a container the paths are the host's, and only the root is mounted: it is looked at too.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        roots = [_CGROUPS / controller, _CGROUPS / names] if names else [_CGROUPS]
        for root in dict.fromkeys(root for root in roots if root.is_dir()):
            inner = root / path.lstrip("/")
            while inner != root and inner.is_relative_to(root):
                yield inner
                inner = inner.parent
            yield root


def _memory_of(group: Path) -> int:
    """The memory limit of one cgroup in bytes; 0 for none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = _word(group / name)
        if value.isdecimal() and int(value) < _NO_LIMIT:
            return int(value)
    return 0


def _quota(group: Path) -> int:
    """How many cores a cgroup may use at a time, rounded up; 0 for no limit."""
    used, _, period = _word(group / "cpu.max").partition(" ")
    if not used:
        used, period = _word(group / "cpu.cfs_quota_us"), _word(group / "cpu.cfs_period_us")
    if not used.isdecimal() or not period.isdecimal() or int(period) == 0:
        return 0
    return -(-int(used) // int(period))


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
