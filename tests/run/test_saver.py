"""When a save is tried, and what a failed one changes: the policy without an engine."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sft.errors import CheckpointError, SavingFailed
from ds_sft.recipe.named import RECIPES
from ds_sft.run import checkpoint
from ds_sft.run import saver as module
from ds_sft.run.layout import RunDir
from ds_sft.run.saver import Saver
from ds_sft.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("process_group")
Usage = namedtuple("Usage", "total used free")
PARAMETERS = 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test moves."""
    hands = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: hands.now)
    return hands


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> Saver:
    """A saver of nothing: what it decides is its own, what it would write is not there."""
    made = Saver.__new__(Saver)
    made.run = RunConfig(data=Path("data"), out=tmp_path / "run", temp_checkpoint_minutes=10)
    made.dir = RunDir(made.run.run_dir)
    made.dir.checkpoints.mkdir(parents=True)
    made.recipe = RECIPES["qwen3-8b"].replace(num_train_steps=100)
    made.engine = SimpleNamespace(device=torch.device("cpu"))
    made.health = SimpleNamespace(require_finite_weights=lambda label: None)  # type: ignore[assignment]
    made.model = SimpleNamespace(shapes={"w": (PARAMETERS,)}, directory=tmp_path)  # type: ignore[assignment]
    made.source = SimpleNamespace(tokenizer_dir=tmp_path)  # type: ignore[assignment]
    made.is_main, made.saved, made.failures_in_a_row, made.seconds_saving = True, 0, 0, 0.0
    made.last_save = clock.now
    monkeypatch.setattr(Saver, "_meta", lambda self, label, temporary: {})
    return made


def saving(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    def save(engine: Any, final: Path, **_: Any) -> int:
        if not works:
            raise CheckpointError("disk full")
        final.mkdir(parents=True)
        return 1

    monkeypatch.setattr(checkpoint, "save", save)


def test_after_a_failed_temporary_save_the_next_is_its_whole_time_away(
    saver: Saver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step again, three failures would end a healthy run within three steps."""
    saving(monkeypatch, works=False)
    clock.now += 601
    assert saver.timer_fired()
    saver.checkpoint(7, temporary=True)
    assert not saver.timer_fired()
    clock.now += 599
    assert not saver.timer_fired()
    clock.now += 2
    assert saver.timer_fired()
    assert saver.saved == 0


def test_the_third_failure_in_a_row_ends_the_run_and_a_success_between_starts_anew(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label, works in ((1, False), (2, False), (3, True), (4, False), (5, False)):
        saving(monkeypatch, works=works)
        saver.checkpoint(label, temporary=False)
    assert saver.saved == 4
    with pytest.raises(SavingFailed, match=r"3 checkpoints in a row failed, .*disk full"):
        saver.checkpoint(6, temporary=False)


@pytest.mark.parametrize("temporary", [True, False])
def test_room_is_looked_for_where_a_link_leads(
    temporary: bool, saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large disks are often linked in: what is free beside the link says nothing."""
    disk = tmp_path / "large-disk"
    disk.mkdir()
    link = saver.dir.temporary if temporary else saver.dir.checkpoints
    if link.exists():
        link.rmdir()
    link.symlink_to(disk)
    free = {disk: 0, saver.dir.root: 10**15}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free[Path(path).resolve()]))
    saving(monkeypatch, works=True)
    saver.checkpoint(7, temporary=temporary)
    assert saver.failures_in_a_row == 1
    free[disk] = 12 * PARAMETERS
    free[saver.dir.root] = 0
    saver.checkpoint(8, temporary=temporary)
    assert (saver.failures_in_a_row, saver.saved) == (0, 9)


def test_a_temporary_checkpoint_needs_no_directory_before_it(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not saver.dir.temporary.exists()
    saving(monkeypatch, works=True)
    saver.checkpoint(7, temporary=True)
    assert saver.saved == 8


def test_rows_reach_the_disk_before_the_checkpoint_that_outlives_them(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the run goes on from the checkpoint, and never writes those rows again."""
    order: list[str] = []
    saver.dir.metrics.write_text("{}\n")
    monkeypatch.setattr(module, "fsync_path", lambda path: order.append(path.name))

    def save(engine: Any, final: Path, **_: Any) -> int:
        final.mkdir(parents=True)
        order.append(final.name)
        return 1

    monkeypatch.setattr(checkpoint, "save", save)
    saver.checkpoint(7, temporary=False)
    assert order == ["metrics.jsonl", "step-7"]


def test_a_run_directory_that_cannot_be_prepared_is_one_error_on_every_rank(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    saver.patient, saver.ds_config, saver.data = None, {}, None  # type: ignore[assignment]
    monkeypatch.setattr(module.manifest, "write_run_json", full)
    with pytest.raises(CheckpointError, match=r"run cannot be prepared: .*No space left"):
        saver.resume(None)


def test_exports_of_the_run_that_this_one_branched_off_are_not_missed(
    saver: Saver, capsys: pytest.CaptureFixture[str]
) -> None:
    saver.recipe = saver.recipe.replace(steps_per_hf_export=20)
    rows = "".join(f'{{"label": {label}, "loss": 1.0}}\n' for label in range(50, 100))
    saver.dir.metrics.write_text(rows)
    (saver.dir.exports / "step-60").mkdir(parents=True)
    saver.report_missing()
    named = [Path(line.split()[1]).name for line in capsys.readouterr().out.splitlines()]
    assert named == ["step-80", "step-99"]
