"""Safetensors files of a Hugging Face model, written as a stream.

Owns the order of tensors in an export, the split into files of at most `max_shard_bytes`, their
names, their headers and the index. A safetensors header depends only on names, shapes and dtypes,
so it is written first and the values follow piece by piece: no shard is ever held in memory.

Invariants: the order depends on names and dtypes alone, so that a live export and an offline one
of the same weights are the same bytes; no value is written that is not finite or that the dtype
cannot hold. Leaves the other files of an export to `hf_format` and renaming to `atomic`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_sft.data.weight_files import INDEX_NAME
from ds_sft.errors import CheckpointError
from ds_sft.run import numerics

MAX_SHARD_BYTES = 5_000_000_000

EXPORT_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
}

SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# Elements that are checked, cast, written and counted at a time: 32 MiB of fp32, and a copy or two.
_PIECE_NUMEL = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of an export before its values are known."""

    name: str
    """Hugging Face name, e.g. `model.layers.0.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Dtype on disk."""

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def export_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an export dtype's name, or raise CheckpointError."""
    if name not in EXPORT_DTYPES:
        raise CheckpointError(f"export dtype {name!r} is not known: use {', '.join(EXPORT_DTYPES)}")
    return EXPORT_DTYPES[name]


def stored_dtype(tensor_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return what a tensor becomes in an export: only floating point values change their dtype."""
    return dtype if tensor_dtype.is_floating_point else tensor_dtype


def in_export_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Sort by name, numbers by value (`layers.2` before `layers.10`).

    Wider dtypes come first: then every tensor starts at a multiple of its item size, which readers
    that map the file need, without holes between tensors, which the format forbids.
    """

    def key(spec: TensorSpec) -> tuple[int, list[tuple[int, int | str]]]:
        parts = re.split(r"(\d+)", spec.name)
        natural = [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
        return -spec.dtype.itemsize, natural

    return sorted(specs, key=key)


def plan_shards(
    specs: Sequence[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[TensorSpec]]:
    """Split tensors, in their order, into files: {file name: its tensors}.

    A file is closed before the tensor that would take it over `max_shard_bytes`; a tensor larger
    than that has a file of its own. One file is called `model.safetensors`, as Transformers does.
    """
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    total = len(shards)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def index_text(shards: dict[str, list[TensorSpec]]) -> str:
    """Return `model.safetensors.index.json`: which file holds which tensor, and bytes in all."""
    total_size = sum(spec.nbytes for specs in shards.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in shards.items() for spec in specs}
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2) + "\n"


def safetensors_header(specs: Sequence[TensorSpec]) -> bytes:
    """Return what precedes the values: length (8 bytes, little endian), then padded JSON.

    Source: the format section of the safetensors README. Transformers refuses files without the
    `format: pt` metadata.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class WeightsWriter:
    """Writes the weights of one export into a directory, tensor by tensor in `order`.

    Call `write` once for each spec of `order`, then `finish`. Keeps no file open between calls.
    """

    def __init__(
        self, directory: Path, specs: Iterable[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self.directory = directory
        self.order = in_export_order(specs)
        self.shards = plan_shards(self.order, max_shard_bytes)
        self._file_of = {spec.name: file for file, ss in self.shards.items() for spec in ss}
        self._written = 0
        self._numbers: dict[str, numerics.Numbers] = {}

    def write(self, spec: TensorSpec, pieces: Iterable[torch.Tensor]) -> None:
        """Append one tensor, given as pieces that follow each other in row-major order.

        Raises CheckpointError if a value is not finite or too large for the dtype, OSError if the
        disk refuses.
        """
        assert spec == self.order[self._written], f"{spec.name} is not the next tensor"
        path = self.directory / self._file_of[spec.name]
        if spec == self.shards[path.name][0]:
            path.write_bytes(safetensors_header(self.shards[path.name]))
        numel = 0
        scan = numerics.Scan()
        with path.open("ab") as file:
            for piece in pieces:
                for part in piece.detach().reshape(-1).split(_PIECE_NUMEL):  # type: ignore[no-untyped-call]
                    values = checked_cast(spec.name, part, spec.dtype).contiguous().cpu()
                    file.write(_bytes_of(values))
                    scan.add(values)
                    numel += part.numel()
        if numel != math.prod(spec.shape):
            raise CheckpointError(
                f"{spec.name} has {numel} values where its shape {list(spec.shape)} needs "
                f"{math.prod(spec.shape)}: the weights are not whole"
            )
        self._written += 1
        self._numbers[spec.name] = scan.result()

    def finish(self) -> None:
        """Write the index if there are several files, and the numbers of all tensors."""
        assert self._written == len(self.order), "finish() before the last tensor"
        if len(self.shards) > 1:
            (self.directory / INDEX_NAME).write_text(index_text(self.shards))
        (self.directory / numerics.NUMERICS_SCAN).write_text(numerics.text(self._numbers))


def checked_cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a float tensor, refusing what the new dtype would turn into inf, and NaN or inf before.

    Raises CheckpointError that names the tensor. Integer tensors pass unchanged.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return values
    low, high = (bound.item() for bound in torch.aminmax(values))  # NaN propagates into both
    largest = max(abs(low), abs(high))
    if not math.isfinite(low + high):
        raise CheckpointError(
            f"{name} holds a value that is not finite (min {low}, max {high}): these weights "
            "cannot be used; export an earlier checkpoint"
        )
    limit = torch.finfo(dtype).max
    if largest > limit:
        raise CheckpointError(
            f"{name} holds {largest:g}, more than {dtype} can hold ({limit:g}): "
            "export with dtype bfloat16 or float32"
        )
    return values.to(dtype)


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor on the CPU, without copying them."""
    return values.view(torch.uint8).numpy().data
