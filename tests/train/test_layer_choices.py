"""Recomputation, offloaded inputs and tiles in real ZeRO-3 runs: the curve stays Levanter's."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import Result, Training, launch_many

HAS_LIGER = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
STEPS = 3
LOSS_LIMIT = 1e-4  # of Levanter's curve, as in test_golden_trajectory
BIT_EQUAL = {
    "none recomputed": {"--recompute-every": 0},
    "every second": {"--recompute-every": 2},
    "offloaded": {"--offload-activations": True},
}
TILES = {
    "tiles": {"--mlp-tiles": 3},
    "all": {"--mlp-tiles": 3, "--recompute-every": 2, "--offload-activations": True},
}


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("layers")
    tight = work / "tight.json"
    tight.write_text(json.dumps(harness.TIGHT))
    common = {"--deepspeed-config": tight, "--stop-after": STEPS, "--skip-checks": True}
    by_name = {"as always": {}, **BIT_EQUAL, **TILES}
    trainings = [
        Training(
            harness.flags(tiny_model, tiny_data, work / str(i), {**common, **changes}),
            module="counted_gathers",
        )
        for i, changes in enumerate(by_name.values())
    ]
    done = launch_many(2, trainings, work)
    for name, result in zip(by_name, done, strict=True):
        assert result.codes == [0, 0], f"{name}: {result.text[-3000:]}"
    return dict(zip(by_name, done, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["as always", *BIT_EQUAL, *TILES])
def test_the_losses_are_levanters(runs: dict[str, Result], name: str) -> None:
    golden = [row["loss"] for row in harness.golden_trajectory("untied")[:STEPS]]
    np.testing.assert_allclose(runs[name].column("loss"), golden, rtol=0, atol=LOSS_LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIT_EQUAL)
def test_what_is_kept_and_where_changes_no_bit(runs: dict[str, Result], name: str) -> None:
    for column in ("loss", "grad_norm"):
        assert runs[name].column(column) == runs["as always"].column(column)


@pytest.mark.slow
@pytest.mark.parametrize("name", TILES)
def test_tiles_change_the_curve_by_rounding_only(runs: dict[str, Result], name: str) -> None:
    for column in ("loss", "grad_norm"):
        want = runs["as always"].column(column)
        np.testing.assert_allclose(runs[name].column(column), want, rtol=2e-6, atol=0)


def gathered(run: Result) -> int:
    """Values of parameters that a rank gathered in the whole run."""
    counts = {int(count) for count in re.findall(r"gathered (\d+) values", run.text)}
    assert len(counts) == 1, "the ranks gathered differently"
    return counts.pop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiles", "all"])
def test_tiles_gather_no_parameter_more_often(runs: dict[str, Result], name: str) -> None:
    assert gathered(runs[name]) <= gathered(runs["as always"])


@pytest.mark.slow
def test_each_choice_is_said_once(runs: dict[str, Result]) -> None:
    text = runs["all"].text
    for line in (
        "recomputing 1 of 2 layers (--recompute-every 2), their inputs wait in host memory",
        "MLP in 3 tiles of a microbatch's tokens (--mlp-tiles)",
        "[init] Liger off (auto: rank 0: Triton compiles for a GPU, this is a cpu)",
    ):
        assert text.count(line) == 1, text


@pytest.fixture(scope="module")
def liger_runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """Without Liger, with it in Triton's interpreter, and where it cannot run."""
    work = tmp_path_factory.mktemp("liger")
    tight = work / "tight.json"
    tight.write_text(json.dumps(harness.TIGHT))
    data = harness.with_validation(tiny_data, work / "data", [5, 20])
    common = {
        "--deepspeed-config": tight, "--skip-checks": True, "--train-batch-size": 2,
        "--loss-groups": 1, "--num-train-steps": 2, "--eval-every": 1,
        "--steps-per-hf-export": 100,
    }  # fmt: skip

    def training(name: str, liger: str, module: str = "ds_sft.train", **env: str) -> Training:
        changes = {**common, "--liger": liger}
        return Training(harness.flags(tiny_model, data, work / name, changes), env, module)

    by_name = {
        "plain": training("plain", "off"),
        "refused": training("refused", "on", TRITON_INTERPRET="0"),
    }
    if HAS_LIGER:
        by_name["kernels"] = training("kernels", "on", "interpreted_liger")
    # Of the whole launch: DeepSpeed imports Triton, which looks at it then, before the fork.
    done = launch_many(2, [*by_name.values()], work, TRITON_INTERPRET="1")
    return dict(zip(by_name, done, strict=True))


@pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel (with triton, 1 GB) is an optional extra")
@pytest.mark.slow
def test_liger_trains_and_evaluates_under_zero3_as_the_plain_modules_do(
    liger_runs: dict[str, Result],
) -> None:
    plain, kernels = liger_runs["plain"], liger_runs["kernels"]
    for result in (plain, kernels):
        assert result.codes == [0, 0], result.text[-3000:]
    assert "[init] Liger on (on: Triton compiles on 2 ranks)" in kernels.text
    for column in ("loss", "grad_norm"):
        np.testing.assert_allclose(kernels.column(column), plain.column(column), rtol=1e-5)
    got, want = (r.evaluations[1]["eval/loss"] for r in (kernels, plain))
    assert got == pytest.approx(want, rel=1e-5)
    assert kernels.text.count("rms_norm backward launches: ") == 2


@pytest.mark.slow
def test_liger_that_cannot_run_is_refused_in_one_line(liger_runs: dict[str, Result]) -> None:
    refused = liger_runs["refused"]
    assert refused.codes == [2, 2]
    (error,) = [line for line in refused.text.splitlines() if line.startswith("error:")]
    assert "--liger on: rank 0: Triton compiles for a GPU, this is a cpu" in error
    assert "Traceback" not in refused.text
