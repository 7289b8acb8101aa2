from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ds_sft.errors import CheckpointError
from ds_sft.run import shards
from ds_sft.run.numerics import NUMERICS_SCAN
from ds_sft.run.shards import (
    TensorSpec,
    WeightsWriter,
    checked_cast,
    export_dtype,
    in_export_order,
    plan_shards,
    stored_dtype,
)


def specs_of(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> list[TensorSpec]:
    return [
        TensorSpec(name=n, shape=tuple(t.shape), dtype=stored_dtype(t.dtype, dtype))
        for n, t in tensors.items()
    ]


def write_all(directory: Path, tensors: dict, dtype: torch.dtype, limit: int) -> WeightsWriter:
    writer = WeightsWriter(directory, specs_of(tensors, dtype), limit)
    for spec in writer.order:
        writer.write(spec, tensors[spec.name].reshape(-1).split(5) or [tensors[spec.name]])
    writer.finish()
    return writer


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.layers.10.w": (3, 7),
        "lm_head.weight": (11, 5),
        "model.layers.2.w": (3, 7),
        "model.norm.weight": (13,),
        "scalar": (),
    }
    made = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    return made | {"model.steps": torch.tensor([3], dtype=torch.int64)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [1, 60, 10_000])
def test_the_library_reads_back_exactly_the_cast_values(
    tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, limit: int
) -> None:
    writer = write_all(tmp_path, tensors, dtype, limit)
    read: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        read |= load_file(file)
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        expected = value.to(dtype) if value.is_floating_point() else value
        assert read[name].dtype == expected.dtype
        assert torch.equal(read[name], expected), name
    assert len(list(tmp_path.glob("*.safetensors"))) == len(writer.shards)


def test_one_file_needs_no_index(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_all(tmp_path, tensors, torch.float32, 10_000)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", NUMERICS_SCAN}


def test_the_index_places_every_tensor_and_sums_the_bytes(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_all(tmp_path, tensors, torch.bfloat16, 100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    numel = sum(t.numel() for t in tensors.values()) - 1
    assert index["metadata"]["total_size"] == 2 * numel + 8
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert index["weight_map"].keys() == tensors.keys()


def test_layers_are_ordered_by_number_and_wide_dtypes_come_first(
    tensors: dict[str, torch.Tensor],
) -> None:
    order = [spec.name for spec in in_export_order(specs_of(tensors, torch.bfloat16))]
    assert order == [
        "model.steps",
        "lm_head.weight",
        "model.layers.2.w",
        "model.layers.10.w",
        "model.norm.weight",
        "scalar",
    ]


def test_the_order_does_not_depend_on_the_input_order(tensors: dict[str, torch.Tensor]) -> None:
    specs = specs_of(tensors, torch.float32)
    orders = {tuple(s.name for s in in_export_order(p)) for p in itertools.permutations(specs)}
    assert len(orders) == 1


@pytest.mark.parametrize("limit", [1, 7, 16, 33, 100])
def test_no_shard_is_over_the_limit_unless_it_is_one_tensor(limit: int) -> None:
    sizes = [3, 9, 1, 14, 2, 2, 2, 8, 30]
    specs = [TensorSpec(name=f"t{i}", shape=(n,), dtype=torch.uint8) for i, n in enumerate(sizes)]
    plan = plan_shards(specs, limit)
    assert [s for shard in plan.values() for s in shard] == specs
    for shard, following in itertools.pairwise([*plan.values(), []]):
        total = sum(spec.nbytes for spec in shard)
        assert total <= limit or len(shard) == 1
        assert not following or total + following[0].nbytes > limit


def test_files_are_numbered_as_transformers_numbers_them() -> None:
    specs = [TensorSpec(name=f"t{i}", shape=(4,), dtype=torch.float32) for i in range(3)]
    assert list(plan_shards(specs, 16)) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert list(plan_shards(specs, 48)) == ["model.safetensors"]


def test_qwen3_8b_in_bfloat16_needs_four_files_of_up_to_5_gb() -> None:
    wide, narrow, inner = 4096, 1024, 12288
    per_layer = [(wide, wide), (narrow, wide), (narrow, wide), (wide, wide)]
    per_layer += [(inner, wide), (inner, wide), (wide, inner), (wide,), (wide,), (128,), (128,)]
    shapes = [(151936, wide)] * 2 + per_layer * 36 + [(wide,)]
    specs = [TensorSpec(name=f"{i}", shape=s, dtype=torch.bfloat16) for i, s in enumerate(shapes)]
    plan = plan_shards(in_export_order(specs))
    assert len(plan) == 4
    assert sum(s.nbytes for shard in plan.values() for s in shard) == 2 * 8_190_735_360


@pytest.mark.parametrize("value", [65505.0, -7e4, math.inf])
def test_float16_overflow_names_the_tensor(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        checked_cast("model.norm.weight", torch.tensor([1.0, value]), torch.float16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_no_dtype_lets_a_value_pass_that_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* not finite"):
        checked_cast("lm_head.weight", torch.tensor([0.0, bad, 1.0]), dtype)


def test_the_largest_float16_passes() -> None:
    values = torch.tensor([65504.0, -65504.0])
    assert torch.equal(checked_cast("w", values, torch.float16).float(), values)


def test_a_value_in_a_later_piece_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_PIECE_NUMEL", 4)
    values = torch.zeros(10)
    values[9] = 1e6
    writer = WeightsWriter(tmp_path, specs_of({"w": values}, torch.float16))
    with pytest.raises(CheckpointError, match="w holds 1e"):
        writer.write(writer.order[0], [values])


def test_too_few_values_are_refused(tmp_path: Path) -> None:
    writer = WeightsWriter(tmp_path, specs_of({"w": torch.zeros(4, 5)}, torch.float32))
    with pytest.raises(CheckpointError, match="w has 19 values"):
        writer.write(writer.order[0], [torch.zeros(19)])


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"'fp8'.*bfloat16, float32, float16"):
        export_dtype("fp8")
