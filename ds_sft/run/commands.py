"""Flags and entry points of `ds-sft export`, `ds-sft verify` and `ds-sft reshard`.

Imports torch only when a command runs, so that `--help` and argument errors answer at once. The
commands read and write files and nothing else: DeepSpeed is told not to look for a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ExportDtype = Literal["bfloat16", "float32", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFlags:
    """Turn a native checkpoint into a Hugging Face model directory, on any machine."""

    checkpoint: Path
    """Native checkpoint, RUN/checkpoints/step-N."""
    out: Path
    """Directory to write, e.g. RUN/hf/step-N; must not exist."""
    dtype: ExportDtype = "bfloat16"
    """Data type of the weights."""
    keep_generation_config: bool = False
    """Copy the trained model's generation_config.json, unchanged (Levanter writes none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFlags:
    """Check that a packed data set, a native checkpoint or an HF export is whole."""

    path: tyro.conf.Positional[Path]
    """What to check; its kind is recognised from its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardFlags:
    """Turn a native checkpoint into one of another number of ranks (training does it by itself)."""

    checkpoint: Path
    """Native checkpoint, RUN/checkpoints/step-N."""
    out: Path
    """Directory to write; must not exist."""
    world_size: int
    """Number of ranks that it is written for."""


def reshard(flags: ReshardFlags) -> None:
    """Run `ds-sft reshard`; raises CheckpointError."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ds_sft.run.reshard import convert

    convert(flags.checkpoint, flags.out, flags.world_size)


def export(flags: ExportFlags) -> None:
    """Run `ds-sft export`; raises CheckpointError."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ds_sft.run.export import export_offline

    export_offline(
        flags.checkpoint,
        flags.out,
        dtype=flags.dtype,
        keep_generation_config=flags.keep_generation_config,
    )


def verify(flags: VerifyFlags) -> None:
    """Run `ds-sft verify`: print what was checked; raises CheckpointError or DataError."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ds_sft.run.verify import verify as verify_path

    for line in verify_path(flags.path):
        print(line, flush=True)
    print(f"[verify] {flags.path} is whole", flush=True)
