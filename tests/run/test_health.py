"""When bad numbers end a run, and when they are only said."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ds_sft.engine.step import StepResult
from ds_sft.errors import TrainingDiverged
from ds_sft.run import health as health_module
from ds_sft.run.health import SPIKE_FROM, Health


def result(step: int, loss: float = 1.0, problem: str = "") -> StepResult:
    return StepResult(
        step=step, loss=loss, lr=0.1, grad_norm=1.0, target_tokens=8, tokens=8, rank0_flag=False,
        over_budget=False, problem=problem,
    )  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(health_module, "say", lines.append)
    return lines


def make(**changes: Any) -> Health:
    run = {"on_nonfinite": "skip", "max_nonfinite": 3, "check_weights_every": 0, **changes}
    return Health(None, SimpleNamespace(**run))  # type: ignore[arg-type]


def test_stop_ends_the_run_at_the_first_and_says_how_to_go_on(said: list[str]) -> None:
    health = make(on_nonfinite="stop")
    with pytest.raises(TrainingDiverged, match=r"P: no weight was changed.*--on-nonfinite skip"):
        health.judge(result(4, math.nan, "P"))
    assert said == []


def test_skip_counts_and_ends_the_run_after_so_many_in_a_row(said: list[str]) -> None:
    health = make()
    for step, problem in enumerate(["P", "P", "", "P", "P"]):
        health.judge(result(step, problem=problem))
    assert (health.dropped, health.in_a_row) == (4, 2)
    assert len(said) == 4
    assert said[-1] == "[nonfinite] P: update dropped (4 so far)"
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        health.judge(result(5, problem="P"))


def test_a_spike_is_said_against_the_running_median_and_never_ends_a_run(said: list[str]) -> None:
    health = make()
    health.judge(result(0, loss=50.0))  # the first losses have nothing to be compared with
    for step in range(1, SPIKE_FROM):
        health.judge(result(step, loss=2.0 + step / 100))
    assert said == []
    health.judge(result(SPIKE_FROM, loss=6.4))
    assert said == [
        f"[warn] the loss of step {SPIKE_FROM} is 6.400, 3.1 times the median of the last "
        f"{SPIKE_FROM} steps (2.085)"
    ]


def test_a_dropped_step_is_no_part_of_the_median(said: list[str]) -> None:
    health = make(max_nonfinite=100)
    for step in range(2 * SPIKE_FROM):
        health.judge(result(step, loss=math.nan, problem="P"))
    said.clear()
    health.judge(result(99, loss=5.0))
    assert said == []


@pytest.mark.parametrize("every", [1, 3])
def test_weights_are_looked_at_every_so_many_steps(
    every: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(health_module.nonfinite, "bad_weights", lambda e: looks.append(0) or [])
    health = make(check_weights_every=every)
    for step in range(9):
        health.judge(result(step))
    assert len(looks) == 9 // every


def test_weights_that_are_not_finite_end_the_run_with_their_names(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layer.{i}" for i in range(5)]
    monkeypatch.setattr(health_module.nonfinite, "bad_weights", lambda engine: names)
    with pytest.raises(TrainingDiverged, match=r"layer.0, layer.1, layer.2 and 2 more"):
        make(check_weights_every=1).judge(result(7))
    assert said == []
