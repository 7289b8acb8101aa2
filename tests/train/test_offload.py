"""Optimizer state in host memory: another JSON, the same curve, the same promise on resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
def test_an_update_depends_on_its_step_and_not_on_the_updates_before_it() -> None:
    """What makes a resume bit-identical; DeepSpeed's own does not."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from ds_sft.engine.cpu_adam import cpu_adam

    def update_101(cls: Callable[..., Any], done_before: int) -> torch.Tensor:
        """What update 101 does to a zero, in a process that did so many updates before it."""
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = cls([{"params": [weight]}], 0.1, betas=(0.9, 0.999), eps=1e-8)
        for step in range(done_before + 1):
            if step == done_before:
                moments = {n: torch.full((64,), 0.1) for n in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": 100, **moments}
                weight.data.zero_()
            weight.grad = torch.linspace(-1.0, 1.0, 64)
            optimizer.step()
        return weight.data.clone()

    for done_before in (100, 40):
        assert torch.equal(update_101(cpu_adam, done_before), update_101(cpu_adam, 0))
    assert not torch.equal(update_101(DeepSpeedCPUAdam, 100), update_101(DeepSpeedCPUAdam, 0))


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("offload")
    offload = {"--deepspeed-config": OFFLOAD, "--hf-export-dtype": "float32"}
    # Groups of 2 instead of 8 ranks; small parameters are split as well.
    values = json.loads((OFFLOAD.parent / "zero3_hpz.json").read_text())
    zero = values["zero_optimization"]
    zero |= {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100}
    (work / "hpz.json").write_text(json.dumps(values))
    hpz = {"--deepspeed-config": work / "hpz.json"}
    wanted = {
        "zero3": ("zero3", {}),
        "hpz, stopped": ("hpz", {**hpz, "--stop-after": 5}),
        "hpz, gone on": ("hpz", hpz),
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


@pytest.mark.slow
def test_a_second_copy_of_the_weights_is_never_an_old_one(runs: dict[str, Result]) -> None:
    """hpZ: after loading, after updates, after a resume, and beside the proofs' own passes."""
    halves = runs["hpz, gone on"]
    assert halves.column("loss") == runs["zero3"].column("loss")
    assert "resumed from" in halves.text
