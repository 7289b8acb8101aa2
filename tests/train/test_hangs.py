"""A rank that stops responding, and a step that does not end: nobody waits for ever.

In two runs a rank is frozen (SIGSTOP), so that neither it nor its heartbeat goes on, once rank 0,
who keeps the store of the beats; the limits are shortened from 45 s to 4. In the third one rank 1
sleeps inside a step, its heartbeat alive.
"""

from __future__ import annotations

import re
from pathlib import Path

import harness
import pytest
from harness import Result, Training, launch_many

from ds_sft.run.layout import labels_in

FROZEN_AT_ONCE = {"PATIENCE_SECONDS": "1"}  # the launcher kills what is frozen


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("hangs")
    often = {"--num-train-steps": 9, "--steps-per-checkpoint": 2, "--steps-per-hf-export": 100}
    changes: dict = {"silent 1": {}, "silent 0": {}, "hang": {"--step-timeout-minutes": 0.1}}
    trainings = [
        Training(
            harness.flags(tiny_model, tiny_data, work / name, {**often, **extra}),
            {"FAIL_AT": name} | ({} if name == "hang" else FROZEN_AT_ONCE), "failing_rank",
        )
        for name, extra in changes.items()
    ]  # fmt: skip
    return dict(zip(changes, launch_many(2, trainings, work), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_leaves_when_its_peer_goes_silent(runs: dict[str, Result], frozen: int) -> None:
    run = runs[f"silent {frozen}"]
    # The frozen one is killed by its launcher.
    assert run.codes == ([-9, 1] if frozen == 0 else [1, -9]), run.text[-3000:]
    assert f"error: rank {1 - frozen} on host " in run.text
    assert f"leaves: rank {frozen} has been silent for " in run.text
    assert len(run.rows) == 3
    assert labels_in(run.out / "checkpoints") == [2]


@pytest.mark.slow
def test_a_step_that_takes_too_long_shows_every_stack_and_ends_the_run(
    runs: dict[str, Result],
) -> None:
    run = runs["hang"]
    assert run.codes == [1, 1], run.text[-3000:]
    for rank in (0, 1):
        assert f"error: rank {rank} on host " in run.text
    said = re.findall(r"leaves: step 3 has taken 0\.\d minutes, more than 0\.1 ", run.text)
    assert len(said) == 2
    assert run.text.count("Current thread") + run.text.count("Thread 0x") >= 4
    assert "failing_rank.py" in run.text  # where rank 1 sleeps
    assert "in train_step" in run.text  # where rank 0 waits for it
    assert len(run.rows) == 3
