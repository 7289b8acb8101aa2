"""Low-rank moments in a native checkpoint, cut by hand: read back, converted, and found damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_sft.errors import CheckpointError
from ds_sft.run.native import NativeCheckpoint
from ds_sft.run.reshard import convert

RANK = 3
SHAPES = {"a": (7, 5), "n": (4,), "b": (5, 9), "e": (6, 2)}
GROUPS = [["a", "n"], ["b", "e"]]
LOW = ("a", "b")


def whole_state() -> dict[str, dict[str, torch.Tensor]]:
    """By kind, for each parameter that has it, all values: [channels, rank] if low-rank."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, dict[str, torch.Tensor]] = {"fp32": {}}
    for name, shape in SHAPES.items():
        state["fp32"][name] = torch.randn(shape, generator=generator)
        kind = "low_rank_" if name in LOW else ""
        size = (max(shape), RANK) if name in LOW else shape
        for moment in ("exp_avg", "exp_avg_sq"):
            values = torch.randn(size, generator=generator)
            state.setdefault(kind + moment, {})[name] = values
    return state


def part_of(values: torch.Tensor, low: bool, world_size: int, rank: int) -> torch.Tensor:
    """A rank's part: rows of a low-rank moment, values of anything else; 7 is padding."""
    rows = values if low else values.reshape(-1, 1)
    size = -(-len(rows) // world_size)
    padded = torch.full((size * world_size, rows.shape[1]), 7.0)
    padded[: len(rows)] = rows
    return padded[rank * size : (rank + 1) * size].reshape(-1)


def write(path: Path, world_size: int, *, spoil: Callable[[dict], None] = lambda s: None) -> Path:
    """What DeepSpeed writes of APOLLO; `spoil` damages the first sub-group of the last rank."""
    (path / "model").mkdir(parents=True)
    whole = whole_state()
    for rank in range(world_size):
        flat, states = [], {}
        for index, names in enumerate(GROUPS):

            def joined(kind: str, names: list[str] = names, rank: int = rank) -> torch.Tensor:
                held = [(whole[kind][n], kind.startswith("low")) for n in names if n in whole[kind]]
                return torch.cat([part_of(v, low, world_size, rank) for v, low in held])

            flat.append(joined("fp32"))
            members = [name for name in names if name in LOW]
            states[index] = {
                "step": 5, **{kind: joined(kind) for kind in whole if kind != "fp32"},
                "update_norm": torch.arange(1.0, len(members) + 1) + index,
                "low_rank": dict.fromkeys(members, RANK),
            }  # fmt: skip
        if rank == world_size - 1:
            spoil(states[0])
        base = {"state": states, "param_groups": []}
        optim = {"fp32_flat_groups": flat, "optimizer_state_dict": base, "partition_count": 1}
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optim}, path / f"{prefix}_optim_states.pt")
        shapes = [{name: torch.Size(SHAPES[name]) for name in names} for names in GROUPS]
        model = {"param_shapes": shapes, "module": {}, "buffer_names": []}
        torch.save(model, path / f"{prefix}_model_states.pt")
    meta = {"format": 1, "label": 4, "completed": 5, "world_size": world_size}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def read_back(native: NativeCheckpoint) -> dict[str, dict[str, torch.Tensor]]:
    """Every kind of every parameter, flat."""
    return {
        kind: {name: torch.cat(list(native.pieces(name, kind))) for name in extents}
        for kind, extents in native.extents.items()
    }


def as_written(found: dict[str, dict[str, torch.Tensor]]) -> bool:
    whole = whole_state()
    return found.keys() == whole.keys() and all(
        found[kind].keys() == whole[kind].keys()
        and all(torch.equal(found[kind][n], v.reshape(-1)) for n, v in whole[kind].items())
        for kind in whole
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_state_comes_back_from_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    native = NativeCheckpoint.open(write(tmp_path / "step-4", world_size))
    assert as_written(read_back(native))
    assert native.low_rank == {"a": RANK, "b": RANK}
    assert {name: float(norm) for name, norm in native.norms.items()} == {"a": 1.0, "b": 2.0}
    assert native.adam_step == 5


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 2), (2, 8)])
def test_a_converted_checkpoint_is_what_so_many_ranks_would_have_written(
    tmp_path: Path, first: int, second: int
) -> None:
    convert(write(tmp_path / "from/step-4", first), tmp_path / "to", second)
    native = NativeCheckpoint.open(tmp_path / "to")
    assert as_written(read_back(native))
    want = NativeCheckpoint.open(write(tmp_path / "want/step-4", second))
    assert native.norms == want.norms
    for kind, ranks in want.flat_groups.items():
        for got, groups in zip(native.flat_groups[kind], ranks, strict=True):
            sizes = [[t.numel() for t in flats] for flats in (got, groups)]
            assert sizes[0] == sizes[1], kind


def test_a_checkpoint_without_any_update_can_be_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "step-4", 2)
    for file in source.glob("*optim_states.pt"):
        states = torch.load(file, weights_only=True)
        states["optimizer_state_dict"]["optimizer_state_dict"]["state"] = {}
        torch.save(states, file)
    convert(source, tmp_path / "to", 3)
    native = NativeCheckpoint.open(tmp_path / "to")
    assert (native.adam_step, native.low_rank) == (0, {})
    assert torch.equal(torch.cat(list(native.pieces("b"))), whole_state()["fp32"]["b"].reshape(-1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.pop("low_rank"), "files of several runs"),
        (lambda s: s["low_rank"].update(a=2), "files of several runs"),
        (lambda s: s.pop("low_rank_exp_avg"), "no states of ds_sft"),
        (lambda s: s.update(exp_avg=torch.zeros(1)), "exp_avg values of rank 1"),
        (lambda s: s.update(low_rank_exp_avg_sq=torch.zeros(1)), "low_rank_exp_avg_sq values of"),
        (lambda s: s.update(step=9), "rank_1_.* has Adam at step 9 of 5"),
        (lambda s: s.update(low_rank=7), "no states of ds_sft"),
    ],
)
def test_a_damaged_state_is_named_in_one_line(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    path = write(tmp_path / "step-4", 2, spoil=spoil)
    with pytest.raises(CheckpointError, match=words) as caught:
        NativeCheckpoint.open(path)
    assert "\n" not in str(caught.value)


def test_norms_that_are_too_few_are_found(tmp_path: Path) -> None:
    def shorten(state: dict[str, Any]) -> None:
        state["update_norm"] = torch.zeros(0)

    with pytest.raises(CheckpointError, match="no states of ds_sft"):
        NativeCheckpoint.open(write(tmp_path / "step-4", 1, spoil=shorten))
