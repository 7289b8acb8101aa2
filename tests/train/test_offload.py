"""Optimizer state in host memory: another JSON, the same curve, the same promise on resume."""

from __future__ import annotations

import json
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import Result, Training, launch_many, weights

OFFLOAD = harness.ROOT / "ds_configs/zero3_offload_optimizer.json"
SAME_LOSS = 1e-5


def test_the_json_moves_the_optimizer_state_and_nothing_else_of_the_numbers() -> None:
    zero = json.loads(OFFLOAD.read_text())["zero_optimization"]
    plain = json.loads((OFFLOAD.parent / "zero3.json").read_text())["zero_optimization"]
    assert zero.pop("offload_optimizer")["device"] == "cpu"
    assert zero.keys() == plain.keys()


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("offload")
    offload = {"--deepspeed-config": OFFLOAD, "--hf-export-dtype": "float32"}
    wanted = {
        "zero3": ("zero3", {}),
        "offload": ("offload", offload),
        "stopped": ("halves", {**offload, "--stop-after": 5}),
        "gone on": ("halves", offload),
    }
    trainings = [
        Training(harness.flags(tiny_model, tiny_data, work / out, changes))
        for out, changes in wanted.values()
    ]
    results = dict(zip(wanted, launch_many(2, trainings, work), strict=True))
    for name, result in results.items():
        assert result.codes == [0, 0], f"{name}: {result.text[-3000:]}"
    return results


@pytest.mark.slow
def test_offload_has_the_curve_of_zero3(runs: dict[str, Result]) -> None:
    assert "[init] optimizer cpu_adam" in runs["offload"].text
    assert "[init] optimizer adamw" in runs["zero3"].text
    for column, limit in (("loss", SAME_LOSS), ("lr", 0.0)):
        got, want = runs["offload"].column(column), runs["zero3"].column(column)
        np.testing.assert_allclose(got, want, rtol=0, atol=limit)


@pytest.mark.slow
def test_resume_with_offload_is_bit_identical(runs: dict[str, Result]) -> None:
    straight, halves = runs["offload"], runs["gone on"]
    assert "resumed from" in halves.text
    for column in ("label", "loss", "lr", "grad_norm"):
        assert halves.column(column) == straight.column(column)
    got, want = weights(halves.out / "hf/step-11"), weights(straight.out / "hf/step-11")
    assert all((got[name] == want[name]).all() for name in want)
