"""Reads masters and moments out of a native checkpoint, without DeepSpeed and its world size.

Owns the layout of a `step-N/` directory as DeepSpeed 0.19 writes it under ZeRO-3: each rank's
`*_optim_states.pt` holds flat fp32 groups, in which the rank's parts of all parameters follow each
other in the order of `param_shapes`. A parameter of n values is cut into W parts of ceil(n/W); the
last ones are padded. APOLLO's low-rank moments are rows of `rank` values, one row for each channel
of a weight: C rows are cut into W parts of ceil(C/W). Files are mapped, so that values are read
only when they are asked for.

Leaves writing checkpoints and resuming from them to the checkpoint module.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_sft.engine.apollo import MEMBERS, NORM, PROJECTED
from ds_sft.errors import CheckpointError
from ds_sft.recipe import low_rank
from ds_sft.run.hf_format import ExportSource, read_json_object
from ds_sft.run.marker import META_NAME, read_meta
from ds_sft.run.seal import check_hashes, check_sizes

MASTERS = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = {MASTERS: "master values", **{m: f"{m} values" for m in (*MOMENTS, *PROJECTED)}}
_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where the values of one parameter lie in the chain of a rank's flat groups."""

    numel: int
    """Values over all ranks, without padding."""
    part: int
    """Values of a rank, padding included."""
    offset: int
    """Of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCheckpoint:
    """A whole native checkpoint, open for reading."""

    path: Path
    """The `step-N` directory."""
    meta: dict[str, Any]
    """Its meta.json."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each parameter by Hugging Face name, in the order of the flat groups."""
    low_rank: dict[str, int]
    """Rank of the moments of each parameter that APOLLO gave low-rank ones, by name."""
    norms: dict[str, torch.Tensor]
    """Norm of the last update of each of these, which limits the next one [1]."""
    extents: dict[str, dict[str, Extent]]
    """By kind, for each parameter that has it, where its values are."""
    buffers: dict[str, torch.Tensor]
    """Persistent buffers by name (few models have any)."""
    flat_groups: dict[str, list[list[torch.Tensor]]]
    """By kind (masters, each moment): [rank][group] flat, mapped from the files; float32, or
    bfloat16 with --master-dtype and --optimizer-state-dtype."""
    adam_step: int
    """Updates that the moments have seen."""

    def dtype(self, kind: str) -> torch.dtype:
        """Precision in which a kind of values is stored; float32 for moments that are not there."""
        groups = self.flat_groups[kind][0]
        return groups[0].dtype if groups else torch.float32

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return len(self.flat_groups[MASTERS])

    @classmethod
    def open_checked(cls, path: Path) -> NativeCheckpoint:
        """`open`, once every listed file is known to be as it was written; reads all of them.

        Before the files are parsed: what a damaged one holds could send the blame anywhere.
        """
        files = read_meta(path).get("files", {})
        check_sizes(path, files)
        check_hashes(path, files)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> NativeCheckpoint:
        """Map every rank's file and check that they fit together; raises CheckpointError."""
        meta = read_meta(path)
        if "world_size" not in meta:
            raise CheckpointError(f"{path / META_NAME} has no valid world_size")
        try:
            return cls._open(path, meta, meta["world_size"])
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} holds no states of ds_sft ({error!r})") from error

    @classmethod
    def _open(cls, path: Path, meta: dict[str, Any], world_size: int) -> NativeCheckpoint:
        model_states = load_states(rank_files(path, "model", world_size)[0])
        frozen = model_states.get("frozen_param_shapes")
        if frozen:
            raise CheckpointError(f"{path} has {len(frozen)} frozen parameters: ds_sft trains all")
        shapes = {
            name: tuple(shape)
            for group in model_states["param_shapes"]
            for name, shape in group.items()
        }
        module = model_states["module"]
        states = [load_states(file)["optimizer_state_dict"]
                  for file in rank_files(path, "optim", world_size)]  # fmt: skip
        per_rank = [[s for _, s in sorted(_base_states(state).items())] for state in states]
        members = [{n: r for group in groups for n, r in group.get(MEMBERS, {}).items()}
                   for groups in per_rank]  # fmt: skip
        if any(ranks != members[0] for ranks in members):
            raise CheckpointError(f"{path} has files of several runs: their moments differ in kind")
        kinds = (*MOMENTS, *(PROJECTED if members[0] else ()))
        flat_groups = {MASTERS: [state["fp32_flat_groups"] for state in states]}
        flat_groups |= {k: [[group[k] for group in groups] for groups in per_rank] for k in kinds}
        extents = {kind: _extents(kind, shapes, members[0], world_size) for kind in flat_groups}
        steps: set[int] = set()
        for rank, file in enumerate(rank_files(path, "optim", world_size)):
            steps |= {int(group["step"]) for group in per_rank[rank]}
            if not all(0 <= step <= meta["completed"] for step in steps):
                raise CheckpointError(
                    f"{file} has Adam at step {max(steps)} of {meta['completed']} completed ones: "
                    "it is of another run"
                )
            for kind in flat_groups if per_rank[rank] else (MASTERS,):
                _check_total(file, rank, kind, flat_groups[kind][rank], extents[kind])
        return cls(
            path=path,
            meta=meta,
            shapes=shapes,
            low_rank=members[0],
            norms={
                name: norm
                for group in per_rank[0]
                for name, norm in zip(group.get(MEMBERS, {}), group.get(NORM, ()), strict=True)
            },
            extents=extents,
            buffers={name: module[name] for name in model_states["buffer_names"]},
            flat_groups=flat_groups,
            adam_step=max(steps, default=0),
        )

    def extents_for(self, kind: str, world_size: int) -> dict[str, Extent]:
        """Where the values of a kind would lie with another number of ranks."""
        return _extents(kind, self.shapes, self.low_rank, world_size)

    def moments(self, name: str) -> tuple[str, ...]:
        """The kinds of moments that parameter `name` has."""
        return PROJECTED if name in self.low_rank else MOMENTS

    def part(self, name: str, start: int, size: int, kind: str) -> torch.Tensor:
        """`size` values of a flat parameter from `start` on, with zeros beyond its end [size]."""
        out = torch.zeros(size)
        begin = 0  # of a piece, in the flat parameter
        for piece in self.pieces(name, kind):
            low, high = max(start, begin), min(start + size, begin + piece.numel())
            if low < high:
                out[low - start : high - start] = piece[low - begin : high - begin]
            begin += piece.numel()
        return out

    def pieces(self, name: str, kind: str = MASTERS) -> Iterator[torch.Tensor]:
        """Yield the values of one parameter in row-major order, as slices of the files."""
        extent = self.extents[kind][name]
        left = extent.numel
        for groups in self.flat_groups[kind]:
            start = extent.offset
            wanted = min(extent.part, left)
            left -= wanted
            for group in groups:
                if wanted and start < group.numel():
                    piece = group[start : start + wanted]
                    wanted -= piece.numel()
                    yield piece
                start = max(0, start - group.numel())

    def export_source(self, keep_generation_config: bool) -> ExportSource:
        """Return what an export needs from the checkpoint's own `model/` directory."""
        folder = self.path / "model"
        generation_config = folder / "generation_config.json"
        if keep_generation_config and not generation_config.is_file():
            raise CheckpointError(
                f"{generation_config} is missing: the model that was trained had none, "
                "export without --keep-generation-config"
            )
        return ExportSource(
            config=read_json_object(folder / "config.json"),
            tokenizer_dir=folder / "tokenizer",
            generation_config=generation_config if keep_generation_config else None,
        )


def rank_files(path: Path, kind: str, world_size: int) -> list[Path]:
    """Return the files of `kind` ("optim" or "model") by rank; raises CheckpointError."""
    found: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        match = _RANK_FILE.match(file.name)
        if match and match[3] == kind:
            if match[2] != "00":
                raise CheckpointError(f"{file} is of a tensor-parallel run: ds_sft writes none")
            found[int(match[1])] = file
    missing = [rank for rank in range(world_size) if rank not in found]
    if missing or len(found) != world_size:
        raise CheckpointError(
            f"{path} has {kind}_states of ranks {sorted(found)} but {META_NAME} says "
            f"world_size={world_size}: the checkpoint is not whole"
        )
    return [found[rank] for rank in range(world_size)]


def load_states(file: Path) -> dict[str, Any]:
    """Map one of DeepSpeed's files; raises CheckpointError if it is cut short or not one.

    Loads only the classes that DeepSpeed itself stores, so that a checkpoint from elsewhere cannot
    run code.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    allowed = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(allowed):
            states = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds objects other than tensors and numbers, which could run code: it is not "
            "opened"
        ) from error
    except Exception as error:  # zip, pickle and OS errors alike mean that the file is no good
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"{file} cannot be read: {reason}") from error
    if not isinstance(states, dict):
        raise CheckpointError(f"{file} holds a {type(states).__name__}, not a state dictionary")
    return states


def _base_states(zero: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """State of the base optimizer by sub-group; empty before the first update."""
    states: dict[int, dict[str, Any]] = zero.get("optimizer_state_dict", {}).get("state", {})
    return states


def _extents(
    kind: str, shapes: dict[str, tuple[int, ...]], members: dict[str, int], world_size: int
) -> dict[str, Extent]:
    """Of every parameter that has values of this kind; the offset is the sum of all parts before.

    Every parameter has a master, and moments of one kind or the other.
    """
    found: dict[str, Extent] = {}
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world_size)
        if kind in PROJECTED and name in members:
            numel = max(shape) * members[name]
            part = low_rank.channels(shape, world_size) * members[name]
        elif kind != MASTERS and (kind in PROJECTED) != (name in members):
            continue
        found[name] = Extent(numel=numel, part=part, offset=offset)
        offset += part
    return found


def _check_total(
    file: Path, rank: int, kind: str, groups: list[torch.Tensor], extents: dict[str, Extent]
) -> None:
    """Check that a rank's flat groups hold exactly its parts of all parameters."""
    wanted = sum(extent.part for extent in extents.values())
    found = sum(group.numel() for group in groups)
    if found == wanted:
        return
    hint = "the checkpoint is not whole"
    if (file.parent / "offloaded_tensors").is_dir():
        hint = "it is on NVMe (offloaded_tensors): export from the running engine"
    raise CheckpointError(
        f"{file} holds {found} {KINDS[kind]} of rank {rank}, the parameters need {wanted}: {hint}"
    )
