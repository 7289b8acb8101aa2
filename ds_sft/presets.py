"""`--preset`: what fits one card of a size, as a table.

Owns the bundles of flags and what is said about them. A preset is plain data: a name of a field of
`RunConfig`, `Recipe` or `prepare`'s flags, and its value; a field that does not exist is a bug that
a test finds. Invariants: a flag that was given wins over the preset, also when it says what the
default says; the preset wins over the recipe. Leaves the reading of the command line to `flags`.

Budgets are 1e9 bytes and leave room for the tenth by which a run may exceed one: a "24 GB" card has
25.8e9 bytes, of which the driver and the CUDA context take some.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from ds_sft.errors import ConfigError

_OFFLOAD = Path("ds_configs/zero3_offload_optimizer.json")

PRESETS: dict[str, dict[str, object]] = {
    "smoke-12gb": {
        "max_seq_len": 2048, "max_samples": 1000, "epochs": 1.0, "train_batch_size": 16,
        "per_device_batch": 1, "memory_budget_gb": 11.5, "deepspeed_config": _OFFLOAD,
        "mlp_tiles": "auto",
    },
    "16gb": {
        "max_seq_len": 4096, "per_device_batch": 1, "memory_budget_gb": 15.0,
        "deepspeed_config": _OFFLOAD, "mlp_tiles": "auto",
    },
    "24gb": {
        "max_seq_len": 8192, "per_device_batch": 1, "memory_budget_gb": 22.5,
        "deepspeed_config": _OFFLOAD, "mlp_tiles": "auto",
    },
    "80gb": {
        "max_seq_len": 32768, "per_device_batch": 1, "memory_budget_gb": 76.0,
        "deepspeed_config": _OFFLOAD, "mlp_tiles": "auto",
    },
}  # fmt: skip
"""For one card; several cards together hold more, and may need no offload."""

OF_PREPARE = ("max_seq_len", "max_samples")
"""Fields that decide about the data; `ds-sft prepare` takes them, training compares the length."""

NOT_FOR_PUBLISHING = {
    "smoke-12gb": "NOT FOR PUBLISHING: preset smoke-12gb trains on 1,000 short samples, to see "
    "that everything works",
}


def preset_named(name: str) -> dict[str, object]:
    """The bundle called `name`; an empty one for the empty name. Raises ConfigError."""
    if not name:
        return {}
    if name not in PRESETS:
        raise ConfigError(f"--preset {name} is not known: use {', '.join(PRESETS)}")
    return PRESETS[name]


def of_training(name: str) -> dict[str, object]:
    """The fields of preset `name` that training takes. Raises ConfigError."""
    return {k: v for k, v in preset_named(name).items() if k not in OF_PREPARE}


def of_prepare(name: str) -> dict[str, object]:
    """The fields of preset `name` that `prepare` takes. Raises ConfigError."""
    return {k: v for k, v in preset_named(name).items() if k in OF_PREPARE}


def origins(
    name: str, given: Set[str], chosen: Mapping[str, Any], recipe: Set[str]
) -> tuple[str, ...]:
    """Where each field that some preset decides has its value from: `flag=value (from ...)`.

    `given` are the fields named on the command line, `chosen` all fields of the command with their
    values, `recipe` the names of those that a recipe has. Empty without a preset.
    """
    preset = preset_named(name)
    fields = dict.fromkeys(f for p in PRESETS.values() for f in p if f in chosen)
    said = []
    for field in fields if preset else ():
        if field in given:
            source = "flag"
        elif field in preset and preset[field] == chosen[field]:
            source = "preset"
        else:
            source = "recipe" if field in recipe else "default"
        said.append(f"{field.replace('_', '-')}={chosen[field]} (from {source})")
    return tuple(said)


def describe(name: str, resolved: tuple[str, ...]) -> list[str]:
    """Lines about the preset of a run; none without one."""
    lines = [f"preset {name}: {', '.join(resolved)}"] if name else []
    return lines + ([NOT_FOR_PUBLISHING[name]] if name in NOT_FOR_PUBLISHING else [])


def check_length(name: str, max_seq_len: int, data: Path, manifest: Mapping[str, Any]) -> str:
    """Compare the preset's length with that of the packed data; a note, or an empty text.

    Raises ConfigError, with the command that makes the data, for packs longer than the preset's.
    """
    length = preset_named(name).get("max_seq_len", max_seq_len)
    assert isinstance(length, int)
    if length < max_seq_len:
        raise ConfigError(
            f"--preset {name} is for packs of up to {length:,} tokens, but {data} has packs of "
            f"{max_seq_len:,}: `{_prepare_command(name, data, manifest)}`, or leave the preset out"
        )
    if length > max_seq_len:
        return (
            f"preset {name} is for packs of {length:,} tokens, {data} has packs of "
            f"{max_seq_len:,}: its length is ignored"
        )
    return ""


def _prepare_command(name: str, data: Path, manifest: Mapping[str, Any]) -> str:
    """The command that packs the same sources to the preset's length."""
    sources = manifest.get("sources") or []
    paths = [str(s["path"]) for s in sources if isinstance(s, Mapping) and "path" in s]
    words = ["ds-sft", "prepare", "--preset", name, "--input", *(paths or ["chats.jsonl"])]
    words += ["--tokenizer", str(manifest.get("tokenizer") or "ID")]
    length = preset_named(name)["max_seq_len"]
    return shlex.join([*words, "--out", f"{data}-{length}"])
