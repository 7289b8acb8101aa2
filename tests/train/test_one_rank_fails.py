"""One rank fails while the others wait for it: everybody ends soon, and nothing half is trusted.

DeepSpeed's launcher ends the ranks of its own host; over several hosts nobody does, so the waiting
ranks have to notice it themselves. Here they get ten seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import harness
import pytest
from harness import Result, Training, launch_many

from ds_sft.run.layout import labels_in


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("failing")
    often = {"--num-train-steps": 5, "--steps-per-checkpoint": 2, "--steps-per-hf-export": 2}
    trainings = [
        Training(
            harness.flags(tiny_model, tiny_data, work / name, often),
            {"FAIL_AT": name}, "failing_rank",
        )
        for name in ("step", "save", "publish", "export")
    ]  # fmt: skip
    names = ("step", "save", "publish", "export")
    return dict(zip(names, launch_many(2, trainings, work), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("step", 3), ("save", 3), ("publish", 3)])
def test_every_rank_ends_by_itself_and_no_checkpoint_appears(
    runs: dict[str, Result], name: str, rows: int
) -> None:
    run = runs[name]
    assert run.codes == [1, 1], run.text[-3000:]
    assert "No space left on device" in run.text
    assert len(run.rows) == rows
    assert labels_in(run.out / "checkpoints") == ([2] if name == "step" else [])
    assert not (run.out / "finished").exists()


@pytest.mark.slow
def test_a_failed_export_is_said_and_the_training_goes_on(runs: dict[str, Result]) -> None:
    run = runs["export"]
    assert run.codes == [0, 0], run.text[-3000:]
    assert run.text.count("[export] FAILED") == 2
    assert "the training goes on" in run.text
    assert json.loads((run.out / "finished").read_text())["completed"] == 5
    assert labels_in(run.out / "checkpoints") == [2, 4]
