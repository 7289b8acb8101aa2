"""Where a DeepSpeed JSON puts the states, what that costs in host memory, and which JSON is next.

Owns the order of the files in `ds_configs`: from what holds everything on the GPU to what holds
nearly nothing there. Files are known by what they say, never by their names, so that a person's own
are found too. No torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import machine
from ds_sft.engine.config import BUFFERS_OF_ADAM, read_json
from ds_sft.errors import ConfigError

Memory = Literal["gpu", "host"]
OPTIMIZER_BYTES = 16  # per parameter: master, two moments and the summed gradient, float32
GRADIENT_BYTES = 4
_SUB_GROUP, _BUFFER, _BUFFERS = 1_000_000_000, 100_000_000, 5  # DeepSpeed's, if the file is silent
CAREFUL_SHARE = 0.9  # of a host's memory: the rest is for Python, the data and the page cache

_NEXT: dict[Memory, dict[tuple[str, str], list[tuple[str, str]]]] = {
    "gpu": {
        ("none", "none"): [("cpu", "none")],
        ("cpu", "none"): [("cpu", "cpu"), ("nvme", "nvme")],
        ("nvme", "none"): [("nvme", "nvme")],
    },
    "host": {
        ("none", "none"): [("nvme", "none")],
        ("cpu", "none"): [("nvme", "none")],
        ("cpu", "cpu"): [("nvme", "nvme"), ("nvme", "none")],
        ("nvme", "none"): [("nvme", "nvme")],
        ("nvme", "cpu"): [("nvme", "nvme")],
    },
}
"""For the memory that ran out: where optimizer and parameters are, and where to put them next.

On a CPU, where "GPU" and host memory are one, only NVMe helps; so `host` has a row for no offload.
"""


def devices(config: dict[str, Any]) -> tuple[str, str]:
    """Where the optimizer state and the parameters are: none (the GPU), cpu or nvme."""
    zero = config.get("zero_optimization", {})
    optimizer, parameters = (
        str(zero.get(name, {}).get("device", "none")).lower()
        for name in ("offload_optimizer", "offload_param")
    )
    return optimizer, parameters


def next_json(
    current: Path, config: dict[str, Any], short: Memory, swaps: bool = True
) -> Path | None:
    """The file beside `current` that needs less of the memory that is short; None if none does.

    Without `swaps` the optimizer's state cannot be on NVMe.
    """
    for wanted in _NEXT[short].get(devices(config), []):
        if wanted[0] == "nvme" and not swaps:
            continue
        # The plainest of several: its name says only what moves.
        for path in sorted(current.parent.glob("*.json"), key=lambda p: (len(p.name), p.name)):
            if path.resolve() != current.resolve() and devices_of_file(path) == wanted:
                return path
    return None


def devices_of_file(path: Path) -> tuple[str, str] | None:
    """`devices` of a DeepSpeed file; None for any other file."""
    try:
        config = read_json(path)
        return devices(config) if "zero_optimization" in config else None
    except (ConfigError, AttributeError):
        return None  # somebody's notes


def host_bytes(
    config: dict[str, Any], model: ModelFiles, world_size: int, moments: int | None = None
) -> int:
    """Host memory that the offloaded states of this host's ranks take, page-locked or not.

    `moments` is how many elements each moment of a rank has with APOLLO; None = AdamW.
    """
    zero = config["zero_optimization"]
    ranks = machine.local_ranks(world_size)
    share = -(-model.num_parameters // world_size)
    optimizer, parameters = devices(config)
    width = 2 if config.get("bf16", {}).get("enabled") else 4
    needed = 0
    if optimizer == "cpu":
        saved = 0 if moments is None else 8 * (share - moments)
        needed += share * OPTIMIZER_BYTES - saved
    if optimizer == "nvme":
        section = zero["offload_optimizer"]
        largest = min(int(zero.get("sub_group_size", _SUB_GROUP)), share)
        needed += share * GRADIENT_BYTES
        needed += section.get("buffer_count", BUFFERS_OF_ADAM) * largest * 4
    if parameters == "cpu":
        needed += share * width
    if parameters == "nvme":
        section = zero["offload_param"]
        buffers = section.get("buffer_count", _BUFFERS) * section.get("buffer_size", _BUFFER)
        needed += int(buffers + section.get("max_in_cpu", 0)) * width
    return math.ceil(needed) * ranks


def note_host_memory(
    current: Path,
    config: dict[str, Any],
    model: ModelFiles,
    world_size: int,
    moments: int | None = None,
) -> str:
    """A warning if what this host's ranks offload does not fit into its memory; else empty."""
    needed = host_bytes(config, model, world_size, moments)
    limit, whose = machine.memory_limit()
    if needed <= CAREFUL_SHARE * limit:
        return ""
    instead = next_json(current, config, "host", swaps=moments is None)
    advice = f": use {instead}" if instead else ""
    ranks = machine.local_ranks(world_size)
    return (
        f"warning: offloading takes {needed / 1e9:.1f} GB of host memory (ranks of this host: "
        f"{ranks}), the {whose} has {limit / 1e9:.1f} GB{advice}"
    )
