"""The numbers of weights, against numpy over all values at once."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_sft.errors import CheckpointError
from ds_sft.run import numerics
from ds_sft.run.numerics import NUMERICS_SCAN, Numbers, Scan, summary
from ds_sft.run.shards import TensorSpec, WeightsWriter


def scanned(values: torch.Tensor, piece: int = 1 << 30) -> Numbers:
    scan = Scan()
    for part in values.split(piece):
        scan.add(part)
    return scan.result()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, and rows that the end of a tensor does not fill."""
    monkeypatch.setattr(numerics, "_ROW", 8)
    monkeypatch.setattr(numerics, "_BLOCK", 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000])
def test_every_number_is_numpys(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = (3 * torch.randn(count, generator=generator) + 0.25).to(dtype)
    values[::5] = 0
    exact = values.double().numpy()
    said = scanned(values)
    assert said["count"] == count
    assert said["zero_share"] == np.mean(exact == 0)
    assert (said["min"], said["max"]) == (exact.min(), exact.max())
    assert said["abs_max"] == np.abs(exact).max()
    assert said["mean"] == pytest.approx(exact.mean(), rel=1e-5, abs=1e-6)
    assert said["std"] == pytest.approx(exact.std(), rel=1e-5, abs=1e-6)
    assert said["non_finite"] == 0


@pytest.mark.parametrize("piece", [1, 5, 63, 64, 65, 200])
def test_the_pieces_change_not_a_bit(piece: int) -> None:
    values = torch.randn(777, generator=torch.Generator().manual_seed(0))
    assert scanned(values, piece) == scanned(values)


def test_threads_change_not_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # real blocks, which torch would share out
    values = torch.randn(1_500_001, generator=torch.Generator().manual_seed(0))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(scanned(values, 400_000))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_what_is_not_finite_is_counted_and_spoils_nothing() -> None:
    values = torch.arange(1, 201, dtype=torch.float32)
    values[[3, 70, 71]] = torch.tensor([math.nan, math.inf, -math.inf])
    exact = values[torch.isfinite(values)].double().numpy()
    said = scanned(values)
    assert said["non_finite"] == 3
    assert (said["min"], said["max"]) == (1.0, 200.0)
    assert said["mean"] == pytest.approx(exact.mean())
    assert said["std"] == pytest.approx(exact.std())
    only = scanned(torch.full((9,), math.nan))
    assert json.loads(json.dumps(only)) == only
    assert (only["non_finite"], only["mean"], only["max"]) == (9, 0.0, 0.0)


@pytest.mark.parametrize("count", [50, 5000])
@pytest.mark.parametrize(
    ("around", "apart"), [(1.1, 1e-4), (100.0, 1e-3), (0.0, 1e-25), (0.0, 1e-39), (1e-20, 1e-24)]
)
def test_the_spread_of_values_that_are_near_each_other_or_zero_is_numpys(
    around: float, apart: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of norms lie around one; a float32 of 1e-25 has no square."""
    if count > 1000:
        monkeypatch.undo()
    values = around + apart * torch.randn(count, generator=torch.Generator().manual_seed(1))
    said, exact = scanned(values, 30), values.double().numpy()
    assert said["std"] == pytest.approx(exact.std(), rel=1e-5, abs=0)
    assert said["mean"] == pytest.approx(exact.mean(), rel=1e-6, abs=1e-6 * apart)
    assert scanned(torch.full((count,), around))["std"] <= 1e-6 * around


@pytest.mark.parametrize("large", [1e20, 3e38])
def test_squares_that_no_float32_holds_are_summed(large: float) -> None:
    values = torch.tensor([large, -large] * 40)
    assert scanned(values)["std"] == pytest.approx(large, rel=1e-6)


def test_an_empty_tensor_has_numbers_too() -> None:
    assert scanned(torch.empty(0)) == {
        "count": 0, "non_finite": 0, "min": 0.0, "max": 0.0, "abs_max": 0.0, "mean": 0.0,
        "std": 0.0, "zero_share": 0.0,
    }  # fmt: skip


def test_an_export_holds_the_numbers_of_what_was_written(tmp_path: Path) -> None:
    tensors = {"b.weight": torch.full((4, 3), 1.001), "a.weight": torch.zeros(5)}
    specs = [
        TensorSpec(name=n, shape=tuple(t.shape), dtype=torch.bfloat16) for n, t in tensors.items()
    ]
    writer = WeightsWriter(tmp_path, specs)
    for spec in writer.order:
        writer.write(spec, tensors[spec.name].reshape(-1).split(2))
    writer.finish()
    said = json.loads((tmp_path / NUMERICS_SCAN).read_text())["tensors"]
    assert list(said) == ["a.weight", "b.weight"]
    assert said["b.weight"]["max"] == said["b.weight"]["mean"] == 1.0  # as bfloat16 holds it
    assert said["a.weight"]["zero_share"] == 1.0
    assert summary(tmp_path) == (
        "2 tensors, 0 values that are not finite, 1 hold zeros only (a.weight); "
        "largest 1 in b.weight"
    )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"tensors": {}}', '{"tensors": {"a":1}}']
)
def test_a_scan_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=NUMERICS_SCAN):
        summary(tmp_path)
    (tmp_path / NUMERICS_SCAN).write_text(content)
    with pytest.raises(CheckpointError, match=f"{NUMERICS_SCAN} cannot be read"):
        summary(tmp_path)


def test_memory_does_not_grow_with_the_tensor() -> None:
    scan = Scan()
    for _ in itertools.repeat(None, 20):
        scan.add(torch.ones(100))
        assert scan._rest.numel() < 64
