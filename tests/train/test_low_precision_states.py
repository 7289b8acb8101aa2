"""Masters and moments in bfloat16: what they lose, and that nothing else is lost.

Checkpoints, resumes (on another number of ranks too) and exports are those of any run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from harness import Result, Training, launch_many, weights

from ds_sft.recipe import low_rank
from ds_sft.recipe.named import RECIPES
from ds_sft.run.export import export_offline
from ds_sft.run.native import MASTERS, MOMENTS, NativeCheckpoint
from ds_sft.run.reshard import convert
from ds_sft.run.verify import verify

pytestmark = pytest.mark.slow
CONFIGS = harness.ROOT / "ds_configs"
MASTER = {"--master-dtype": "bfloat16"}
BOTH = {**MASTER, "--optimizer-state-dtype": "bfloat16"}
OFFLOAD = {"--deepspeed-config": CONFIGS / "zero3_offload_optimizer.json"}
FINE = {"--learning-rate": 2e-5, "--weight-decay": 0.0}
LAST = 5


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """Six steps each; `moved` goes on on one rank after three steps of `both` on two."""
    work = tmp_path_factory.mktemp("bf16")

    def training(out: str, changes: dict[str, Any]) -> Training:
        words = {
            "--compute-dtype": "bfloat16", "--num-train-steps": LAST + 1, "--keep-checkpoints": 0,
            "--steps-per-checkpoint": 1, **changes,
        }  # fmt: skip
        return Training(harness.flags(tiny_model, tiny_data, work / out, words))

    wanted = {
        "float32": ("float32", {}),
        "both": ("both", BOTH),
        "masters": ("masters", {**MASTER, **OFFLOAD}),
        "fine": ("fine", FINE),
        "fine, both": ("fine-both", {**FINE, **BOTH}),
        "offloaded": ("offloaded", {**BOTH, **OFFLOAD}),
        "both, resumed": ("both-resumed", {**BOTH, "--resume": work / "both/checkpoints/step-2"}),
        "masters, resumed": (
            "masters-resumed",
            {**MASTER, **OFFLOAD, "--resume": work / "masters/checkpoints/step-2"},
        ),
    }
    many = [training(out, changes) for out, changes in wanted.values()]
    results = dict(zip(wanted, launch_many(2, many, work), strict=True))
    resumed = {**BOTH, "--resume": work / "both/checkpoints/step-2"}
    results["moved"] = launch_many(1, [training("moved", resumed)], work)[0]
    for name, result in results.items():
        assert set(result.codes) == {0}, f"{name}: {result.text[-3000:]}"
    return results


def state(run: Result, label: int = LAST) -> NativeCheckpoint:
    return NativeCheckpoint.open(run.out / f"checkpoints/step-{label}")


def master(run: Result, name: str) -> torch.Tensor:
    return torch.cat(list(state(run).pieces(name)))


def test_masters_and_moments_have_the_asked_precision(runs: dict[str, Result]) -> None:
    wide, narrow = torch.float32, torch.bfloat16
    want = {"float32": (wide, wide), "both": (narrow, narrow), "masters": (narrow, wide)}
    want |= {"offloaded": (narrow, narrow), "moved": (narrow, narrow)}
    for name, dtypes in want.items():
        found = state(runs[name])
        assert (found.dtype(MASTERS), found.dtype(MOMENTS[0])) == dtypes, name


def test_a_checkpoint_has_the_bytes_that_the_recipe_says(runs: dict[str, Result]) -> None:
    for name, flags in {"float32": {}, "masters": MASTER, "both": BOTH}.items():
        checkpoint = runs[name].out / f"checkpoints/step-{LAST}"
        size = sum(file.stat().st_size for file in checkpoint.glob("*optim_states.pt"))
        values = {k.removeprefix("--").replace("-", "_"): v for k, v in flags.items()}
        recipe = RECIPES["qwen3-8b"].replace(**values)
        expected = low_rank.checkpoint_bytes({"one": (1,)}, recipe)
        numel = sum(math.prod(shape) for shape in state(runs[name]).shapes.values())
        assert size / numel == pytest.approx(expected, rel=0.1), name


def test_the_start_says_that_the_curve_is_not_levanters(runs: dict[str, Result]) -> None:
    assert "NOT LEVANTER'S CURVE: masters" in runs["masters"].text
    assert "Adam's moments are bfloat16" in runs["both"].text
    assert "Adam's moments are bfloat16" not in runs["masters"].text
    assert "LEVANTER'S CURVE" not in runs["float32"].text
    assert "not_levanters_curve" in (runs["both"].out / "run.json").read_text()
    assert "not_levanters_curve" not in (runs["float32"].out / "run.json").read_text()


def test_updates_below_half_a_step_of_bfloat16_vanish(
    runs: dict[str, Result], tiny_model: Path
) -> None:
    """Adam moves each weight by about the learning rate; most are too large for that to show."""
    name = "model.layers.0.mlp.up_proj.weight"
    start = torch.from_numpy(weights(tiny_model)[name]).flatten().float().bfloat16()
    moved = {run: (master(runs[run], name) != start) for run in ("fine", "fine, both")}
    print({run: f"{share.float().mean():.3f} of {name} moved" for run, share in moved.items()})
    assert moved["fine"].float().mean() > 0.99
    assert moved["fine, both"].float().mean() < 0.1
    half_a_step = torch.finfo(torch.bfloat16).eps / 2 * 2.0 ** start.float().abs().log2().floor()
    largest = 2 * (LAST + 1) * 2e-5  # of all six updates
    assert not moved["fine, both"][half_a_step > largest].any()
    losses = {run: runs[run].column("loss") for run in moved}
    apart = np.abs(np.subtract(losses["fine"], losses["fine, both"]))
    assert apart[0] == 0.0
    assert apart[-1] > 1e-4


def test_the_curve_of_large_updates_is_near_that_of_float32(runs: dict[str, Result]) -> None:
    for name in ("both", "masters", "offloaded"):
        apart = np.abs(np.subtract(runs[name].column("loss"), runs["float32"].column("loss")))
        assert 1e-5 < apart.max() < 0.05, name


def test_a_resumed_run_is_bit_identical(runs: dict[str, Result]) -> None:
    for straight in ("both", "masters"):
        name = f"{straight}, resumed"
        assert "resumed from" in runs[name].text
        got = runs[name].column("loss")
        assert got == runs[straight].column("loss")[-len(got) :]
        one, two = state(runs[name]), state(runs[straight])
        for kind in (MASTERS, *MOMENTS):
            for parameter in one.shapes:
                pieces = (torch.cat(list(c.pieces(parameter, kind))) for c in (one, two))
                assert torch.equal(*pieces), f"{kind} of {parameter}"


def test_a_run_goes_on_on_another_number_of_ranks(runs: dict[str, Result]) -> None:
    assert "2 ranks, 1 read it" in runs["moved"].text
    got, want = runs["moved"].column("loss"), runs["both"].column("loss")[3:]
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", ["both", "masters"])
def test_exports_and_reshards_are_those_of_any_run(
    name: str, runs: dict[str, Result], tmp_path: Path
) -> None:
    checkpoint = runs[name].out / f"checkpoints/step-{LAST}"
    assert any("bfloat16 master values" in line for line in verify(checkpoint))
    export_offline(checkpoint, tmp_path / "hf", dtype="bfloat16", keep_generation_config=False)
    assert harness.same_files(tmp_path / "hf", runs[name].out / f"hf/step-{LAST}")
    convert(checkpoint, tmp_path / "three", 3)
    one, two = NativeCheckpoint.open(checkpoint), NativeCheckpoint.open(tmp_path / "three")
    for kind in (MASTERS, *MOMENTS):
        assert one.dtype(kind) == two.dtype(kind)
        for parameter in one.shapes:
            pieces = (torch.cat(list(c.pieces(parameter, kind))) for c in (one, two))
            assert torch.equal(*pieces)
