"""What this machine has, and what it does in a second, for `ds-sft fit`.

Owns the defaults that are read from the machine (GPU and host memory, free disk) and the
measurements of `--measure`. Invariants: a container's memory limit counts, not the host's memory;
what cannot be measured here stays an assumption and is said to be one. torch is imported only to
look for a GPU and to measure.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds_sft.engine import rates, swap_files
from ds_sft.engine.machine import memory_limit
from ds_sft.engine.rates import Rates
from ds_sft.errors import ConfigError
from ds_sft.fit_question import FitFlags, Machine

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "B": 1}
_UNITS |= {p + "B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {p + "IB": 1024**i for i, p in enumerate("KMGT", 1)}
_DISK_BYTES = 256 * 2**20
_MOST_BYTES = 2**60


def machine_of(flags: FitFlags) -> Machine:
    """The machine asked about: flags first, then what is here. Raises ConfigError."""
    return Machine(
        gpu_memory=parse_size(flags.gpu_memory, "--gpu-memory")
        if flags.gpu_memory
        else _gpu_here(),
        host_memory=parse_size(flags.host_memory, "--host-memory")
        if flags.host_memory
        else memory_limit()[0],
        nvme=None if flags.nvme_path is None else free_space(flags.nvme_path),
    )


def parse_size(text: str, flag: str) -> int:
    """Bytes of `24GiB`, `80GB`, `512 MiB`. Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS or not 0 < float(match[1]) < _MOST_BYTES:
        raise ConfigError(f"{flag} {text[:50]!r} is not a size: write for example 24GiB or 80GB")
    size = int(float(match[1]) * _UNITS[unit])
    if size > _MOST_BYTES:
        raise ConfigError(f"{flag} {text[:50]!r} is more than any machine has")
    if size < 2**20:
        raise ConfigError(f"{flag} {text!r} is less than 1 MiB: is the unit missing, as in 24GiB?")
    return size


def free_space(path: Path) -> int:
    """Bytes free where swap files would go, as training counts them. Raises ConfigError."""
    swap_files.check_place(path)
    return swap_files.free(path)


def _gpu_here() -> int:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "--gpu-memory is missing, and this machine has no CUDA device to read it from: give "
            "for example --gpu-memory 24GiB"
        )
    return int(torch.cuda.get_device_properties(0).total_memory)


def rates_of(flags: FitFlags, machine: Machine) -> Rates:
    """Assumed rates, and measured ones in their place with --measure."""
    several = flags.world_size > flags.gpus_per_node
    found = rates.assumed(machine.gpu_memory, several_nodes=several)
    return measured(found, flags.nvme_path) if flags.measure else found


def measured(assumed: Rates, nvme_path: Path | None) -> Rates:
    """`assumed` with what can be measured here in its place. Raises ConfigError for a bad disk."""
    import torch

    values: dict[str, float] = {"host_memory": _copy_rate(torch.device("cpu"))}
    if torch.cuda.is_available():
        cuda = torch.device("cuda")
        values |= {
            "gpu_flops": 0.6 * _matmul_rate(cuda),  # attention, norms and the head's softmax
            "gpu_memory": _copy_rate(cuda),
            "pcie": _pcie_rate(cuda),
        }
    if nvme_path is not None:
        values["nvme_write"], values["nvme_read"] = _disk_rates(nvme_path)
    return replace(assumed, **values, measured=tuple(values))  # type: ignore[arg-type]


def _best(work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of three runs, after one that does not count."""
    best = float("inf")
    for attempt in range(4):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> Callable[[], object]:
    import torch

    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _matmul_rate(device: torch.device, size: int = 8192) -> float:
    import torch

    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / _best(lambda: one @ one, _wait(device))


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second."""
    import torch

    source = torch.ones(64 * 2**20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), _wait(device))


def _pcie_rate(device: torch.device) -> float:
    import torch

    host = torch.ones(64 * 2**20).pin_memory()
    target = torch.empty_like(host, device=device)
    return host.nbytes / _best(lambda: target.copy_(host, non_blocking=True), _wait(device))


def _disk_rates(path: Path) -> tuple[float, float]:
    """Bytes written and read in a second, past the page cache as DeepSpeed does it."""
    file = path / f"ds-sft-fit-{os.getpid()}"
    try:
        with mmap.mmap(-1, _DISK_BYTES) as block:
            block.write(os.urandom(2**20) * (_DISK_BYTES // 2**20))
            view = memoryview(block)
            try:
                start = time.perf_counter()
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
                _all(lambda done: os.write(descriptor, view[done:]))
                os.fsync(descriptor)
                os.close(descriptor)
                written = time.perf_counter() - start
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
                start = time.perf_counter()
                _all(lambda done: os.readv(descriptor, [view[done:]]))
                read = time.perf_counter() - start
                os.close(descriptor)
            finally:
                view.release()
    except OSError as error:
        raise ConfigError(
            f"--nvme-path {path} cannot be measured (O_DIRECT: {error.strerror}): name a directory "
            "on a local disk, or drop --measure"
        ) from None
    finally:
        file.unlink(missing_ok=True)
    return _DISK_BYTES / written, _DISK_BYTES / read


def _all(move: Callable[[int], int]) -> None:
    """Call `move` with the bytes done so far until all are done."""
    done = 0
    while done < _DISK_BYTES:
        moved = move(done)
        if moved <= 0:
            raise OSError(5, "short transfer")
        done += moved
