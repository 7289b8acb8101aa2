"""The checks of `ds-sft doctor`: each looks at one thing and says what to do about it.

Owns what is looked at. Invariants: a check never raises and changes nothing; what fails says which
kinds of runs it stops (`stops`) and names a remedy, or the JSON that does without. Leaves compilers
and operators to `doctor_build`, the table and the verdict to `doctor`. Imports torch only in
functions.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_sft.engine import host_memory, machine, placement, swap_files
from ds_sft.errors import ConfigError
from ds_sft.run import disk

State = Literal["ok", "warn", "FAIL", "-"]
Kind = Literal["all", "cpu", "nvme"]
"""Runs that a failure stops: every one, those with CPU Adam (any offload), those that use NVMe."""

WITHOUT_NVME = "or use ds_configs/zero3_offload_optimizer.json"
_SLOW_DISK = 1e9  # bytes per second; below it the optimizer waits for the disk in every step
_FEW_FILES = 4096
_SMALL_SHARED_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    """What was looked at."""
    state: State
    """ok; warn: it runs, but; FAIL: what `stops` names cannot run; -: not looked at."""
    detail: str
    """What was found, with values."""
    advice: str = ""
    """What to do, for anything but ok."""
    stops: tuple[Kind, ...] = ()
    """What cannot run; only of a failure."""


def nvme(path: Path | None) -> Iterator[Check]:
    """Is `path` fit for swap files, how fast is it, and what did dead runs leave there?"""
    name = "NVMe path"
    if path is None:
        yield Check(name=name, state="-", detail="none given", advice="--nvme-path DIR checks it")
        return
    try:
        swap_files.check_place(path)
    except ConfigError as error:
        detail, _, advice = str(error).rpartition(": ")
        if "zero3_offload_optimizer.json" not in advice:
            advice = f"{advice}, {WITHOUT_NVME}"
        yield Check(name=name, state="FAIL", detail=detail, advice=advice, stops=("nvme",))
        return
    free, kind = shutil.disk_usage(path).free, swap_files.file_system(path)
    yield Check(
        name=name, state="ok",
        detail=f"{path} ({kind}) takes direct writes, {free / 1e9:.1f} GB free: room for the "
        f"optimizer of {free / swap_files.OPTIMIZER_BYTES / 1e9:.1f} B parameters",
    )  # fmt: skip
    yield _speed(path)
    yield _leftovers(path)


def _speed(path: Path) -> Check:
    try:
        write, read = disk.bandwidth(path)
    except OSError as error:
        return Check(
            name="NVMe speed", state="warn", detail=f"not measured: {error}",
            advice="make room, or name another --nvme-path",
        )  # fmt: skip
    said = f"{write / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read (direct, 8 x 1 MiB)"
    if min(write, read) < _SLOW_DISK:
        return Check(
            name="NVMe speed", state="warn", detail=said,
            advice="a step reads and writes 12 bytes per parameter: name a faster disk with "
            f"--nvme-path, {WITHOUT_NVME}",
        )  # fmt: skip
    return Check(name="NVMe speed", state="ok", detail=said)


def _leftovers(path: Path) -> Check:
    dead = swap_files.abandoned(path)
    size = sum(map(swap_files.size_of, dead)) / 1e9
    if dead:
        return Check(
            name="NVMe leftovers", state="warn", detail=f"{len(dead)} of dead runs, {size:.2f} GB",
            advice="the next run at this path removes them",
        )  # fmt: skip
    return Check(name="NVMe leftovers", state="ok", detail="none of dead runs")


def shared_memory(root: Path = disk.SHARED_MEMORY) -> Check:
    """Room in /dev/shm, which NCCL needs, and what dead runs hold there."""
    name = str(root)
    if not root.is_dir():
        return Check(name=name, state="warn", detail="not there", advice="NCCL wants it mounted")
    dead, size = disk.shared_memory_leftovers(root)
    if dead:
        return Check(
            name=name, state="warn",
            detail=f"{len(dead)} segments of dead processes hold {size / 1e6:.0f} MB of memory",
            advice=f"remove them, for example {dead[0]}",
        )  # fmt: skip
    total = shutil.disk_usage(root).total
    if total < _SMALL_SHARED_MEMORY:
        return Check(
            name=name, state="warn", detail=f"{total / 1e6:.0f} MB; NCCL between GPUs needs more",
            advice="docker run --shm-size=8g, or --ipc=host",
        )  # fmt: skip
    return Check(name=name, state="ok", detail=f"{total / 1e9:.1f} GB, nothing of dead processes")


def limits() -> Iterator[Check]:
    """`ulimit -l` and `ulimit -n`."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    native = os.environ.get("DS_PIN_MEMORY_BACKEND", "").lower() == "native"
    if locked == resource.RLIM_INFINITY:
        yield Check(name="ulimit -l", state="ok", detail="unlimited")
    else:
        yield Check(
            name="ulimit -l", state="warn" if native else "ok",
            detail=f"{locked / 1e6:.1f} MB may be page-locked by mlock; CUDA's own is not counted",
            advice="`ulimit -l unlimited`, or unset DS_PIN_MEMORY_BACKEND" if native else "",
        )  # fmt: skip
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < _FEW_FILES
    yield Check(
        name="ulimit -n", state="warn" if few else "ok",
        detail="unlimited" if files == resource.RLIM_INFINITY else f"{files:,} open files",
        advice=f"`ulimit -n {_FEW_FILES}`: many ranks open many files" if few else "",
    )  # fmt: skip


def memory() -> Check:
    """Host memory, as far as the container may use it."""
    limit, whose = machine.memory_limit()
    total = machine.memory_total()
    parameters = placement.CAREFUL_SHARE * limit / host_memory.OFFLOADED_BYTES / 1e9
    of = f" of the host's {total / 1e9:.1f} GB" if whose == "container" else ""
    return Check(
        name="host memory", state="ok",
        detail=f"{limit / 1e9:.1f} GB ({whose}){of}: room for the optimizer of "
        f"{parameters:.1f} B parameters ({host_memory.OFFLOADED_BYTES} bytes each, a tenth left)",
    )  # fmt: skip


def threads() -> Check:
    """OpenMP threads that a rank would get."""
    return Check(name="CPU threads", state="ok", detail=machine.set_threads(dict(os.environ)))


def packages() -> Check:
    """The packages that train, with their versions."""
    names = ("torch", "deepspeed", "transformers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Check(
            name="packages", state="FAIL", detail=f"{', '.join(missing)} cannot be imported",
            advice="pip install ds-sft in this environment", stops=("all",),
        )  # fmt: skip
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Check(name="packages", state="ok", detail=versions)


def gpu() -> Check:
    """The CUDA devices."""
    import torch

    problem = machine.accelerator_problem()
    if problem:
        return Check(name="GPU", state="FAIL", detail=problem, advice="unset it", stops=("all",))
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no device is seen"
        return Check(
            name="GPU", state="warn", detail=f"none: {why}",
            advice="runs use the CPU, for tests of tiny models (DS_ACCELERATOR=cpu)",
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(0)
    return Check(
        name="GPU", state="ok",
        detail=f"{torch.cuda.device_count()} x {properties.name}, "
        f"{properties.total_memory / 1e9:.1f} GB",
    )  # fmt: skip


def attention() -> Check:
    """The kernel of --attn-impl auto, and why not a faster one."""
    import torch

    from ds_sft.model.attention import choose

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel, why = choose("auto", device, torch.bfloat16)
    slower = kernel == "sdpa" and device.type == "cuda"
    return Check(
        name="attention", state="warn" if slower else "ok", detail=f"auto takes {kernel} ({why})",
        advice="pip install ds-sft[gpu] for flash-attn" if slower else "",
    )  # fmt: skip


def liger() -> Check:
    """Whether Liger's kernels can be used here, for the architectures that have been compared."""
    import torch

    from ds_sft.model.liger import ARCHITECTURES, obstacle

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = obstacle({"model_type": ARCHITECTURES[0], "hidden_act": "silu"}, device)
    if reason:
        return Check(
            name="Liger", state="-", detail=f"not usable: {reason}",
            advice="the plain kernels compute the same (--liger auto takes them)",
        )  # fmt: skip
    return Check(name="Liger", state="ok", detail="Triton compiles here")


def versions_of_driver() -> Check | None:
    """The NVIDIA driver, where there is one: a GPU that torch does not see has its reason there."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = (done.stdout or done.stderr).strip().splitlines()
    return Check(
        name="driver", state="ok" if done.returncode == 0 else "warn",
        detail=said[0] if said else "nvidia-smi says nothing",
        advice="" if done.returncode == 0 else "look at `nvidia-smi`",
    )  # fmt: skip
