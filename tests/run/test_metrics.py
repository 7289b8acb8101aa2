"""RunLog and its parts, without a launch: forms of lines, rows that a resumed run replaces, W&B."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_sft.engine.evaluate import EvalResult
from ds_sft.engine.step import StepResult
from ds_sft.errors import CheckpointError, SavingFailed
from ds_sft.run import metrics, rows
from ds_sft.run.layout import RunDir
from ds_sft.run.metrics import RunLog, hms, never_stop
from ds_sft.run.rows import keep_before, open_rows
from ds_sft.run_config import RunConfig

NO_MONITOR: Any = SimpleNamespace(enabled=False)


def result(step: int, **changes: Any) -> StepResult:
    values = {
        "step": step, "loss": 1.5, "lr": 0.001, "grad_norm": 2.0, "target_tokens": 10,
        "tokens": 100, "rank0_flag": False, "over_budget": False, "problem": "",
    }  # fmt: skip
    return StepResult(**{**values, **changes})


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_rank(rank: int, world_size: int = 2) -> None:
        monkeypatch.setattr(metrics.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(metrics.dist, "get_world_size", lambda: world_size)

    set_rank(0)
    return set_rank


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(**changes: Any) -> RunConfig:
        return RunConfig(data=tmp_path / "data", out=tmp_path, **changes)

    return make


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0:00:00"), (61, "0:01:01"), (6163, "1:42:43"), (-5, "0:00:00")]
)
def test_durations_are_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert hms(seconds) == text


def test_a_line_has_levanters_form(
    as_rank: Any, config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    log = RunLog(config(), 2000, 0, NO_MONITOR, None)
    for step in range(12):
        clock[0] += 37.2 / 12
        log.step(result(step, loss=1.2341))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "Progress on:train 12it/2.00kit rate:3.1s/it remaining:1:42:42 elapsed:0:00:37 "
        "postfix:loss=1.234"
    )


def test_other_ranks_write_and_say_nothing(
    as_rank: Any, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(1)
    log = RunLog(config(wandb_project="sft"), 2, 0, NO_MONITOR, None)
    log.step(result(0))
    log.finished()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_last_step_is_printed_whatever_log_every_is(
    as_rank: Any, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(config(log_every=100), 3, 0, NO_MONITOR, None)
    for step in range(3):
        log.step(result(step))
    said = [line for line in capsys.readouterr().out.splitlines() if "Progress" in line]
    assert [line.split("it/")[0] for line in said] == ["Progress on:train 3"]


def test_time_for_saving_does_not_count_as_step_time(
    as_rank: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    log = RunLog(config(), 2, 0, NO_MONITOR, mfu=0.01)
    clock[0] += 2.0
    log.step(result(0))
    clock[0] += 50.0  # an export
    log.resume_clock()
    clock[0] += 4.0
    log.step(result(1))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step_time_s"] for row in rows] == [2.0, 4.0]
    assert [row["tokens_per_s"] for row in rows] == [50.0, 25.0]
    assert [row["mfu"] for row in rows] == [0.25, 0.125]  # per rank, of two


def test_a_long_step_gives_a_sign_of_life_every_30_seconds(
    as_rank: Any, config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    log = RunLog(config(), 2, 0, NO_MONITOR, None)
    for done in range(1, 9):
        clock[0] += 10.0
        log.within_step(done, 8)
    said = [line for line in capsys.readouterr().out.splitlines() if "microbatch" in line]
    assert said == ["[train] microbatch 4 of 8 in this step"]


def test_rows_that_a_resumed_run_writes_again_are_dropped_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keep_before(path, 3)  # nothing there yet: a fresh run
    path.write_text("".join(json.dumps({"label": n}) + "\n" for n in range(6)) + '{"label": 6, "lo')
    keep_before(path, 4)
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    keep_before(path, 4)
    assert len(path.read_text().splitlines()) == 4


def test_rows_that_come_again_are_counted_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody whose checkpoints are gone sees that the run begins again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"label": n}) + "\n" for n in range(6)))
    open_rows(path, 4).close()
    open_rows(path, 4).close()
    assert capsys.readouterr().out == f"[init] 2 rows of {path} come again, from step 4\n"


@pytest.mark.usefixtures("as_rank")
def test_a_disk_that_is_full_at_the_start_or_the_end_is_one_line(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    log = RunLog(config(), 2, 0, NO_MONITOR, None)
    monkeypatch.setattr(metrics.manifest, "write_finished", full)
    with pytest.raises(SavingFailed, match=r"all is saved, but .*finished cannot be written: .*No"):
        log.finished()
    monkeypatch.setattr(rows, "write_file", full)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written: .*No space"):
        RunLog(config(), 2, 0, NO_MONITOR, None)


def test_a_failing_logger_is_a_line_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert never_stop(lambda: 1 / 0) is None
    assert capsys.readouterr().err == "[wandb] ZeroDivisionError: division by zero\n"


def test_missing_wandb_is_said_once(
    as_rank: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    log = RunLog(config(wandb_project="sft"), 2, 0, NO_MONITOR, None)
    for step in range(2):
        log.step(result(step))
    log.finished()
    assert capsys.readouterr().out.count("[wandb] not installed") == 1
    assert RunDir(tmp_path).finished.is_file()


@pytest.mark.usefixtures("as_rank")
def test_a_dropped_update_is_a_row_of_plain_json(config: Any, tmp_path: Path) -> None:
    log = RunLog(config(), 20, 0, NO_MONITOR, None)
    log.step(result(0, loss=math.nan, grad_norm=math.inf, problem="the loss of step 0 is nan"))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["loss"], row["grad_norm"]) == (None, None)
    assert row["dropped"] == "the loss of step 0 is nan"


def test_an_evaluation_is_a_row_of_its_own_kind_and_its_time_is_no_steps(
    as_rank: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    log = RunLog(config(), 2, 0, NO_MONITOR, None)
    clock[0] += 2.0
    log.step(result(0))
    for loss in (1.25, float("nan")):
        clock[0] += 60.0
        log.evaluation(0, EvalResult(loss=loss, target_tokens=1234, seconds=60.0))
    clock[0] += 3.0
    log.step(result(1))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1] == {
        "label": 0, "eval/loss": 1.25, "eval/tokens": 1234, "eval/seconds": 60.0,
    }  # fmt: skip
    assert rows[2]["eval/loss"] is None  # not finite; JSON has no word for it
    assert [row["step_time_s"] for row in rows if "loss" in row] == [2.0, 3.0]
    said = capsys.readouterr().out
    assert "[eval] step-0 loss=1.2500 over 1,234 tokens in 60.0 s" in said
    assert "[eval] step-0 loss=nan" in said


def test_an_evaluation_reaches_wandb_and_the_monitors(as_rank: Any, config: Any) -> None:
    logged: list[dict[str, Any]] = []
    events: list[Any] = []
    monitor: Any = SimpleNamespace(enabled=True, write_events=events.extend)
    log = RunLog(config(), 2, 0, monitor, None)
    log.wandb = SimpleNamespace(log=logged.append)
    log.evaluation(7, EvalResult(loss=1.25, target_tokens=10, seconds=2.0))
    assert logged == [{"label": 7, "eval/loss": 1.25, "eval/tokens": 10, "eval/seconds": 2.0}]
    assert events == [("Eval/loss", 1.25, 8)]


def test_rank_zero_tells_everybody_which_evaluations_are_in_the_metrics(
    as_rank: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"label": 3, "loss": 1.0}, {"label": 3, "eval/loss": 1.0}, {"label": 4, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(metrics.dist, "broadcast_object_list", lambda box, src: None)
    log = RunLog(config(), 9, 4, NO_MONITOR, None)  # the row of step 4 is written again
    assert log.has_evaluation(3)
    assert not log.has_evaluation(4)
    as_rank(1)
    monkeypatch.setattr(
        metrics.dist, "broadcast_object_list", lambda box, src: box.__setitem__(0, True)
    )
    assert RunLog(config(), 9, 4, NO_MONITOR, None).has_evaluation(4)


def test_a_long_evaluation_gives_a_sign_of_life(
    as_rank: Any, config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    log = RunLog(config(), 2, 0, NO_MONITOR, None)
    for done in range(1, 9):
        clock[0] += 10.0
        log.within_evaluation(done, 8)
    assert "[eval] microbatch 4 of 8" in capsys.readouterr().out
