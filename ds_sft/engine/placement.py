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
from ds_sft.engine import host_memory, machine
from ds_sft.engine.config import read_json
from ds_sft.engine.memory import DEFAULTS
from ds_sft.engine.setup import Setup
from ds_sft.errors import ConfigError

Memory = Literal["gpu", "host"]
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
    return host_memory.device(zero, "offload_optimizer"), host_memory.device(zero, "offload_param")


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
    """Host memory that the offloaded states of this host's ranks take, with their buffers.

    `moments` is how many elements each moment of a rank has with APOLLO; None = AdamW.
    """
    ranks = machine.local_ranks(world_size)
    setup = Setup(
        numels={name: math.prod(shape) for name, (shape, _) in model.tensors.items()},
        tied=model.tied,
        world_size=world_size,
        gpus_per_node=ranks,
        compute_bytes=2 if config.get("bf16", {}).get("enabled") else 4,
        reduce_bytes=4,  # of the GPU
        moments=moments,
    )
    needed = host_memory.of_rank(
        setup.at_precision(config), {**DEFAULTS, **config["zero_optimization"]}
    )
    return ranks * (needed.states + needed.buffers)


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
