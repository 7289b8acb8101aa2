"""APOLLO's update of odd matrices in any cut, against the paper's formulas on whole matrices.

The reference shares nothing with ds_sft but the drawing of the projections.
"""

from __future__ import annotations

import math
from typing import Any

import apollo_worker as worker
import pytest
import torch
from apollo_worker import CASES, CLIP, DECAY, SHAPES, STEPS
from harness import Training, launch_many

from ds_sft.engine.apollo_maths import projection

pytestmark = pytest.mark.slow
WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Final weights of every case on each number of ranks."""
    work = tmp_path_factory.mktemp("slices")
    trainings = [
        Training(["--out", work / f"{ranks}.pt"], module="apollo_worker", ranks=ranks)
        for ranks in WORLDS
    ]
    for done in launch_many(1, trainings, work):
        assert set(done.codes) == {0}, done.text[-3000:]
    return {ranks: torch.load(work / f"{ranks}.pt", weights_only=True) for ranks in WORLDS}


def gradients(step: int, world_size: int) -> dict[str, torch.Tensor]:
    """Mean over ranks and microbatches, clipped by its norm over all weights."""
    mean = {
        name: sum(
            worker.gradient(name, step, micro, rank).double()
            for micro in range(2) for rank in range(world_size)
        ) / (2 * world_size) * (name != "unused")
        for name in SHAPES
    }  # fmt: skip
    norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
    assert norm > CLIP or step not in (0, 7)
    return {name: g * min(1.0, CLIP / (norm + 1e-6)) for name, g in mean.items()}


def low_rank_update(
    name: str, t: int, g: torch.Tensor, state: dict[str, Any], case: dict[str, Any]
) -> torch.Tensor:
    recipe = worker.recipe_of(case)
    rank, scale, mini = recipe.apollo_rank, recipe.apollo_scale, case.get("mini")
    number = (t - 1) // recipe.apollo_update_proj_gap
    p = projection(3, list(SHAPES).index(name), number, SHAPES[name], rank).double()
    rows, columns = SHAPES[name]
    r = g @ p if rows >= columns else p.T @ g
    m, v = (b * state.get(k, 0.0) + (1 - b) * x for k, b, x in
            (("m", recipe.beta1, r), ("v", recipe.beta2, r * r)))  # fmt: skip
    state |= {"m": m, "v": v}
    n = m / (v.sqrt() + recipe.eps)
    along = 1 if rows >= columns else 0
    if mini:
        update = g * n.norm() / (r.norm() + 1e-8) * math.sqrt(scale)
    else:
        update = g * n.norm(dim=along, keepdim=True) / (r.norm(dim=along, keepdim=True) + 1e-8)
    norm, before = float(update.norm()), state.get("norm", 0.0)
    if before and norm > 1.01 * before:
        update *= 1.01 * before / norm
    state["norm"] = float(update.norm())
    return update if mini else update * math.sqrt(scale)


def reference(case: dict[str, Any], world_size: int) -> dict[str, torch.Tensor]:
    """Final weights, on whole matrices in float64."""
    recipe = worker.recipe_of(case)
    b1, b2 = recipe.beta1, recipe.beta2
    weights = {name: worker.start(name).double() for name in SHAPES}
    states: dict[str, dict[str, Any]] = {name: {} for name in SHAPES}
    for t in range(1, STEPS + 1):
        lr = recipe.learning_rate / t
        for name, g in gradients(t - 1, world_size).items():
            state, correction = states[name], math.sqrt(1 - b2**t) / (1 - b1**t)
            if name != "table" and min(SHAPES[name]) > recipe.apollo_rank:
                update = low_rank_update(name, t, g, state, case)
            else:
                state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
                state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
                update = state["m"] / (state["v"].sqrt() + recipe.eps * math.sqrt(1 - b2**t))
            decay = 0.0 if name == "table" else DECAY
            weights[name] = weights[name] * (1 - lr * decay) - lr * correction * update
    return weights


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_any_cut_is_the_update_of_whole_matrices(
    found: dict[int, Any], case: str, world_size: int
) -> None:
    got, want = found[world_size][case], reference(CASES[case], world_size)
    for name, weight in got.items():
        name = name.removesuffix(".weight")
        moved = (want[name] - worker.start(name)).norm()
        assert moved > 0, name
        apart, rounding = (weight.double() - want[name]).norm(), 2e-7 * want[name].norm()
        assert apart <= 2e-5 * moved + rounding, (name, float(apart / moved))
