"""Evaluations during a run: the training does not notice them, and an interrupted one is made up.

That their loss is plain torch's, for 1, 2 and 3 ranks, is in test_golden_trajectory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import Result, Training, launch_many

pytestmark = pytest.mark.slow
LABELS = [3, 6, 7]
# Every parameter is gathered, prefetched and freed; what a forward leaves behind would show.
TIGHT = {
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 20000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 40000,
        "stage3_max_reuse_distance": 0,
    }
}
RUN = {
    "--num-train-steps": 8, "--train-batch-size": 4, "--eval-every": 3,
    "--hf-export-dtype": "float32", "--steps-per-checkpoint": 100,
}  # fmt: skip
EXACT = ("label", "loss", "lr", "grad_norm", "target_tokens", "tokens")


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """Every training of this file, by name; those called `chain` go on from one another."""
    work = tmp_path_factory.mktemp("evaluation")
    tight = work / "tight.json"
    tight.write_text(json.dumps(TIGHT))
    five = harness.with_validation(tiny_data, work / "data", [3, 27, 9, 14, 0])

    def training(name: str, data: Path, trouble: str = "", **changes: Any) -> Training:
        changes = {**RUN, "--deepspeed-config": tight, **changes}
        words = harness.flags(tiny_model, data, work / name.split(":")[0], changes)
        if not trouble:
            return Training(words)
        return Training(words, {"IN_EVALUATION": trouble}, module="troubled_evaluation")

    wanted = {
        "straight": training("straight", five),
        "none": training("none", tiny_data, **{"--eval-every": None}),
        "chain: killed": training("chain", five, "kill 3"),
        "chain: stopped": training("chain", five, "stop 3"),
        "chain: killed at the end": training("chain", five, "kill 7"),
        "chain: stopped at the end": training("chain", five, "stop 7"),
        "chain": training("chain", five),
    }
    return dict(zip(wanted, launch_many(2, list(wanted.values()), work), strict=True))


def exact(result: Result) -> list[list[Any]]:
    return [[row[name] for name in EXACT] for row in result.rows]


def test_the_training_is_bit_equal_with_and_without_evaluations(runs: dict[str, Result]) -> None:
    assert runs["straight"].codes == runs["none"].codes == [0, 0]
    assert exact(runs["straight"]) == exact(runs["none"])
    ours, theirs = (runs[n].out / "hf/step-7/model.safetensors" for n in ("straight", "none"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert list(runs["straight"].evaluations) == LABELS
    assert runs["none"].evaluations == {}


def test_an_evaluation_follows_its_step_in_the_metrics(runs: dict[str, Result]) -> None:
    kinds = [(row["label"], "eval/loss" in row) for row in harness.metrics(runs["straight"].out)]
    assert kinds == sorted([(n, False) for n in range(8)] + [(n, True) for n in LABELS])


def test_a_stop_is_heard_inside_an_evaluation(runs: dict[str, Result]) -> None:
    stopped = runs["chain: stopped"]
    assert stopped.codes == [75, 75]
    assert "[stop] the file `stop` appeared after 4 steps" in stopped.text


def test_a_stop_inside_the_last_evaluation_is_no_finished_run(runs: dict[str, Result]) -> None:
    stopped = runs["chain: stopped at the end"]
    assert stopped.codes == [75, 75]
    assert "[stop] the file `stop` appeared after 8 steps" in stopped.text
    assert "[done]" not in stopped.text


def test_what_was_interrupted_is_evaluated_again_and_once_in_the_end(
    runs: dict[str, Result],
) -> None:
    """Killed and stopped at label 3, killed and stopped at the last one: the rows of one run."""
    assert runs["chain: killed"].codes == runs["chain: killed at the end"].codes == [-9, -9]
    chain, straight = runs["chain"], runs["straight"]
    assert chain.codes == [0, 0]
    assert (chain.out / "finished").is_file()
    assert exact(chain) == exact(straight)
    got, want = chain.evaluations, straight.evaluations
    assert list(got) == LABELS
    assert [row["eval/loss"] for row in got.values()] == [r["eval/loss"] for r in want.values()]
