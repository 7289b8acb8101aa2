"""APOLLO's formulas against the authors' own numbers, and the cutting of a matrix into slices."""

from __future__ import annotations

import json
import math
from typing import Any

import harness
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.engine import apollo_maths as maths

GOLDEN = harness.GOLDEN / "apollo"
META = json.loads((GOLDEN / "meta.json").read_text())
CASES = sorted(META["cases"])
MATRICES = ("square", "tall", "wide")


def test_there_are_two_cases_with_arrays() -> None:
    assert CASES == sorted(p.stem for p in GOLDEN.glob("*.npz")) == ["channel_r4_gap5", "mini_r1"]


class OneMatrix:
    """The formulas in their order, on a whole matrix."""

    def __init__(self, weight: np.ndarray, rank: int) -> None:
        self.weight = torch.from_numpy(weight.copy())
        self.tall = maths.is_tall(weight.shape)
        self.moments = [torch.zeros(max(weight.shape), rank) for _ in range(2)]
        self.norm = torch.zeros(1)
        self.step = 0

    def update(self, grad: np.ndarray, p: torch.Tensor, lr: float, case: dict[str, Any]) -> None:
        update, betas = torch.from_numpy(grad.copy()), tuple(META["betas"])
        self.step += 1
        r = torch.zeros_like(self.moments[0])
        (block,) = maths.blocks(0, update.numel(), update.shape[1])
        maths.add_projected(r, update, block, self.tall, p)
        n = maths.direction(r, *self.moments, betas, META["eps"])
        factors = maths.factors(n, r)
        if case["scale_type"] == "tensor":
            factors = maths.factor_of_squares(n.square().sum(), r.square().sum()).expand(len(r))
        maths.multiply(update, block, self.tall, factors)
        root = math.sqrt(case["scale"])
        update *= root if case["front"] else 1.0
        norm = update.norm().reshape(1)
        bound = maths.limit(norm, self.norm)
        self.norm = norm * bound
        update *= bound * (1.0 if case["front"] else root)
        self.weight -= maths.step_size(lr, betas, self.step) * update


def trajectory_error(name: str, case: dict[str, Any], matrix: str) -> float:
    """Largest difference of a weight to the authors' over all steps."""
    arrays = np.load(GOLDEN / f"{name}.npz")
    mine = OneMatrix(arrays[f"w0/{matrix}"], case["rank"])
    worst = 0.0
    for step in range(20):
        p = torch.from_numpy(arrays[f"p/{step}/{matrix}"])
        p = p.T if mine.tall else p  # theirs has the rank first for a tall matrix
        mine.update(arrays[f"g/{step}/{matrix}"], p, float(arrays["lr"][step]), case)
        apart = np.abs(mine.weight.numpy() - arrays[f"w/{step}/{matrix}"])
        worst = max(worst, float(apart.max()))
    return worst


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_the_authors(name: str, matrix: str) -> None:
    assert trajectory_error(name, META["cases"][name], matrix) <= 1e-6


@pytest.mark.parametrize(
    "wrong", [{"scale": 2.0}, {"scale_type": "tensor"}, {"front": True, "scale": 1.1}]
)
def test_a_wrong_setting_would_be_seen(wrong: dict[str, Any]) -> None:
    case = {**META["cases"]["channel_r4_gap5"], **wrong}
    assert trajectory_error("channel_r4_gap5", case, "tall") > 1e-4


def test_the_spike_meets_the_growth_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "limit", lambda norm, previous: torch.ones_like(norm))
    assert trajectory_error("channel_r4_gap5", META["cases"]["channel_r4_gap5"], "wide") > 1e-4


def test_a_norm_grows_by_a_hundredth_at_most_and_the_first_one_is_free() -> None:
    norms, before = torch.tensor([5.0, 2.0, 1.0, 3.0]), torch.tensor([0.0, 1.0, 1.0, 30.0])
    assert (norms * maths.limit(norms, before)).tolist() == pytest.approx([5.0, 1.01, 1.0, 3.0])


def test_a_channel_without_gradient_stays_finite() -> None:
    r = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    n = maths.direction(r, torch.ones(2, 2), torch.ones(2, 2), (0.9, 0.999), 1e-8)
    assert maths.factors(n, r).isfinite().all()
    assert maths.factor_of_squares(torch.zeros(1), torch.zeros(1)).item() == 0.0


@settings(deadline=None)
@given(
    rows=st.integers(1, 9), width=st.integers(1, 9), ranks=st.integers(1, 5), rank=st.integers(1, 3)
)
def test_slices_of_any_number_of_ranks_project_to_the_whole(
    rows: int, width: int, ranks: int, rank: int
) -> None:
    grad = torch.arange(1.0, rows * width + 1).view(rows, width)
    tall = maths.is_tall(grad.shape)
    p = maths.projection(0, 0, 0, grad.shape, rank)
    want = (grad if tall else grad.T) @ p
    got, scaled = torch.zeros_like(want), torch.empty(rows * width)
    part = -(-grad.numel() // ranks)
    factors = torch.arange(2.0, max(rows, width) + 2)
    for start in range(0, grad.numel(), part):
        own = grad.flatten()[start : start + part].clone()
        cut = list(maths.blocks(start, own.numel(), width))
        assert len(cut) <= 3
        for block in cut:
            maths.add_projected(got, block.of(own), block, tall, p)
            maths.multiply(block.of(own), block, tall, factors)
        scaled[start : start + own.numel()] = own
    torch.testing.assert_close(got, want)
    whole = grad * (factors[:, None] if tall else factors)
    assert torch.equal(scaled.view(rows, width), whole)


def test_projections_differ_by_seed_parameter_and_number_and_have_variance_1_over_rank() -> None:
    shape, rank = (300, 200), 50
    one = maths.projection(3, 1, 2, shape, rank)
    assert one.shape == (200, 50)
    assert torch.equal(one, maths.projection(3, 1, 2, shape, rank))
    for other in ((4, 1, 2), (3, 2, 2), (3, 1, 3), (1, 3, 2)):
        assert not torch.equal(one, maths.projection(*other, shape, rank))
    assert one.var().item() == pytest.approx(1 / rank, rel=0.05)
    assert abs(one.mean().item()) < 0.01
