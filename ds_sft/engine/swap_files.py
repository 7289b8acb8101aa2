"""Where DeepSpeed puts its swap files: is the place fit for it, and whose are the files there.

Owns everything below `nvme_path`. DeepSpeed names swap files by rank only, so two runs with the
same path would overwrite each other's state, and a killed run leaves its files for ever. Here every
process has a directory of its own, held by a lock for as long as it lives. Invariants: nobody
writes into a directory that another process holds; a directory whose process is dead is removed by
the next run that comes to the same path, and its own is removed when a process ends. Nothing in it
is ever read again: what survives a run is in its checkpoints. Leaves the writing to `aio`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import aio, machine
from ds_sft.errors import ConfigError

PREFIX = "ds-sft-swap-"
OFFLOADS = ("offload_optimizer", "offload_param")
# Masters, two moments and the gradient of a step, all float32.
OPTIMIZER_BYTES = 16
BUFFER_SIZE = 100_000_000  # DeepSpeed's, where the file says nothing
IN_MEMORY = ("tmpfs", "ramfs")
_LOCK = "lock"
_held: list[TextIO] = []  # open for as long as the process lives
_mine: list[Path] = []


def paths(ds_config: dict[str, Any]) -> dict[str, Path]:
    """{offload section: its nvme_path} for what the DeepSpeed configuration puts on NVMe."""
    zero = ds_config["zero_optimization"]
    return {
        name: Path(zero[name]["nvme_path"])
        for name in OFFLOADS
        if zero.get(name, {}).get("device", "none") == "nvme"
    }


def bytes_per_parameter(ds_config: dict[str, Any], name: str) -> int:
    """What DeepSpeed writes at most for one parameter that this rank owns."""
    if name == "offload_optimizer":
        return OPTIMIZER_BYTES
    return 2 if ds_config.get("bf16", {}).get("enabled") else 4


def check(ds_config: dict[str, Any], model: ModelFiles | None, world_size: int) -> None:
    """Raise ConfigError unless each place of swap files is a disk with enough room for this host.

    Without a `model` the sizes are left unchecked.
    """
    here = machine.local_ranks(world_size)
    needed: dict[Path, int] = {}
    for name, path in paths(ds_config).items():
        check_place(path)
        share = 0 if model is None else model.num_parameters * here // world_size
        needed[path] = needed.get(path, 0) + share * bytes_per_parameter(ds_config, name)
    if model is not None and "offload_param" in paths(ds_config):
        _check_buffers(ds_config["zero_optimization"]["offload_param"], model, world_size)
    for path, size in needed.items():
        room = free(path)
        if room < size:
            raise ConfigError(
                f"nvme_path {path} has {room / 1e9:.1f} GB free, but {here} ranks of this host "
                f"swap {size / 1e9:.1f} GB to it: make room, or name another --nvme-path"
            )


def _check_buffers(section: dict[str, Any], model: ModelFiles, world_size: int) -> None:
    numel, name = max((math.prod(shape), name) for name, (shape, _) in model.tensors.items())
    wanted, given = -(-numel // world_size), section.get("buffer_size", BUFFER_SIZE)
    if given < wanted:
        raise ConfigError(
            f"`zero_optimization.offload_param.buffer_size` is {given:,}, but a rank's part of "
            f"{name} has {wanted:,} elements: write at least that"
        )


def check_place(path: Path) -> None:
    """Raise ConfigError unless `path` is a directory on a disk that takes direct writes."""
    if not path.is_dir():
        raise ConfigError(
            f"nvme_path {path} is not a directory: name one on a local NVMe disk with --nvme-path"
        )
    kind = file_system(path)
    if kind in IN_MEMORY:
        raise ConfigError(
            f"nvme_path {path} is a {kind}, which is host memory and no disk: name a directory on "
            "a disk with --nvme-path, or use ds_configs/zero3_offload_optimizer.json"
        )
    probe = path / f"{PREFIX}probe-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:  # direct writes want aligned memory
                os.write(descriptor, page)
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"nvme_path {path} cannot be written as DeepSpeed does (O_DIRECT: {error.strerror}): "
            "name a directory on a local disk with --nvme-path"
        ) from None


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, as the kernel names it."""
    found, kind = "", ""
    resolved = path.resolve()
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        # The last of several mounts on one place is the one that is seen.
        if resolved.is_relative_to(point) and len(point) >= len(found):
            found, kind = point, right.split()[0]
    return kind


def claim(ds_config: dict[str, Any]) -> dict[str, Any]:
    """`ds_config` with directories of this process alone in place of each nvme_path.

    Removes what dead processes left beside them. Raises ConfigError, also when the operator that
    reads and writes them cannot be built.
    """
    if paths(ds_config):
        aio.prepare()
    made: dict[Path, Path] = {}
    zero = dict(ds_config["zero_optimization"])
    for name, path in paths(ds_config).items():
        if path not in made:
            try:
                made[path] = _own_directory(path)
            except OSError as error:
                raise ConfigError(f"nvme_path {path} cannot be written: {error}") from None
        zero[name] = {**zero[name], "nvme_path": str(made[path])}
    return {**ds_config, "zero_optimization": zero}


def _own_directory(path: Path) -> Path:
    with _only_one(path):
        for directory in abandoned(path):
            shutil.rmtree(directory, ignore_errors=True)
        rank = os.environ.get("RANK", "0")
        mine = Path(tempfile.mkdtemp(prefix=f"{PREFIX}rank{rank}-", dir=path))
        lock = (mine / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
    _mine.append(mine)
    return mine


@atexit.register
def release() -> None:
    """Remove this process' own directories; training also calls it where it ends at once."""
    for directory in _mine:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Between making a directory and locking it, it looks abandoned: nobody may look then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def abandoned(path: Path) -> list[Path]:
    """Swap directories in `path` that no living process holds."""
    return [d for d in path.glob(f"{PREFIX}rank*") if d.is_dir() and not _is_held(d)]


def _is_held(directory: Path) -> bool:
    try:
        with (directory / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # killed before it had its lock
    except OSError:
        return True  # held, or another user's
    return False


def free(path: Path) -> int:
    """Bytes that swap files may take at `path`; what dead runs left is removed before."""
    return shutil.disk_usage(path).free + sum(map(size_of, abandoned(path)))


def size_of(directory: Path) -> int:
    """Bytes on disk below `directory`."""
    size = 0
    for folder, _, names in os.walk(directory):  # which passes over what vanishes meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(folder, name).stat().st_blocks * 512
    return size
