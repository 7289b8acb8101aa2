"""One rank fails while the others wait for it: everybody ends soon, and nothing half is trusted.

DeepSpeed's launcher ends the ranks of its own host; over several hosts nobody does, so the waiting
ranks have to notice it themselves. Here they get ten seconds.
"""

from __future__ import annotations

import json
import socket
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
    often = {"--num-train-steps": 9, "--steps-per-checkpoint": 2, "--steps-per-hf-export": 4}
    trainings = [
        Training(
            harness.flags(tiny_model, tiny_data, work / name, often),
            {"FAIL_AT": name}, "failing_rank",
        )
        for name in ("step", "save", "publish", "export")
    ]  # fmt: skip
    last = {**often, "--num-train-steps": 2}
    for changes in (last, {**last, "--num-train-steps": 9, "--stop-after": 1}):
        words = harness.flags(tiny_model, tiny_data, work / f"last-{len(changes)}", changes)
        trainings.append(Training(words, {"FAIL_AT": "save"}, "failing_rank"))
    names = ("step", "save", "publish", "export", "last", "stopping")
    return dict(zip(names, launch_many(2, trainings, work), strict=True))


@pytest.mark.slow
def test_a_rank_that_fails_in_a_step_ends_all_ranks(runs: dict[str, Result]) -> None:
    run = runs["step"]
    assert run.codes == [1, 1], run.text[-3000:]
    assert "No space left on device" in run.text
    assert len(run.rows) == 3
    assert labels_in(run.out / "checkpoints") == [2]
    assert not (run.out / "finished").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save", "publish"])
def test_a_failed_save_is_tried_again_and_the_third_in_a_row_ends_the_run(
    runs: dict[str, Result], name: str
) -> None:
    run = runs[name]
    assert run.codes == [1, 1], run.text[-3000:]
    assert run.text.count("[checkpoint] FAILED") == 2  # labels 2 and 4; 6 is the third
    assert "error: 3 checkpoints in a row failed" in run.text
    assert "No space left on device" in run.text
    assert "Traceback" not in run.text
    assert len(run.rows) == 7
    assert list((run.out / "checkpoints").iterdir()) == []
    assert not (run.out / "finished").exists()


@pytest.mark.slow
def test_a_failed_export_is_said_and_the_training_goes_on(runs: dict[str, Result]) -> None:
    run = runs["export"]
    assert run.codes == [0, 0], run.text[-3000:]
    assert run.text.count("[export] FAILED") == 2
    assert "the training goes on" in run.text
    assert json.loads((run.out / "finished").read_text())["completed"] == 9
    assert labels_in(run.out / "checkpoints") == [4, 6, 8]  # 4 and 8 wait for their exports
    assert f"ds-sft export --checkpoint {run.out}/checkpoints/step-4 --out" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last", "stopping"])
def test_a_run_whose_last_save_failed_claims_neither_an_end_nor_a_stop(
    runs: dict[str, Result], name: str
) -> None:
    run = runs[name]
    assert run.codes == [1, 1], run.text[-3000:]
    assert "could not be saved: make room and start again, it goes on after 0 steps" in run.text
    assert not (run.out / "finished").exists()
    assert "[done]" not in run.text
    assert "[stop]" not in run.text


@pytest.mark.slow
def test_a_port_that_another_program_holds_is_one_line(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """DeepSpeed's own default is the same for each run of a machine."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = harness.flags(tiny_model, tiny_data, tmp_path / "run")
        training = Training(words, {"MASTER_PORT": port})
        (run,) = launch_many(1, [training], tmp_path / "work")
    assert run.codes == [2], run.text[-3000:]
    assert f"error: port {port}, at which the ranks meet, is in use" in run.text
    assert "Traceback" not in run.text
