"""The run directory without torch: names, what is whole, what goes and what stays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_sft.data.sealed import sealed_json
from ds_sft.errors import CheckpointError
from ds_sft.run import checkpoint, resume
from ds_sft.run.layout import RunDir, labels_in, step_dir
from ds_sft.run_config import RunConfig


def point(parent: Path, label: int, **meta: object) -> Path:
    """A checkpoint as far as `resume` reads it."""
    directory = step_dir(parent, label)
    directory.mkdir(parents=True)
    record = {"format": 1, "label": label, "completed": label + 1, **meta}
    (directory / "meta.json").write_text(json.dumps(record))
    return directory


def find(out: Path) -> resume.ResumePoint | None:
    return resume.find(RunConfig(data=Path("data"), out=out))[0]


def test_labels_are_numbers_and_partial_directories_are_none(tmp_path: Path) -> None:
    odd = ("step-0099", "step-٣٣", "step-x", "other")
    for name in ("step-9", "step-10", "step-11.partial", "step-8.replaced", *odd):
        (tmp_path / name).mkdir()
    (tmp_path / "step-12").write_text("a file")
    assert labels_in(tmp_path) == [9, 10]
    assert labels_in(tmp_path / "nothing") == []


def test_a_fresh_directory_starts_at_the_beginning(tmp_path: Path) -> None:
    assert find(tmp_path / "new") is None
    assert find(tmp_path) is None


@pytest.mark.parametrize(("permanent", "temporary"), [(9, 11), (11, 9)])
def test_the_newest_of_either_kind_is_taken(tmp_path: Path, permanent: int, temporary: int) -> None:
    point(RunDir(tmp_path).checkpoints, permanent)
    point(RunDir(tmp_path).temporary, temporary)
    found = find(tmp_path)
    assert found is not None
    assert found.completed == 12


def test_what_has_no_marker_is_not_whole(tmp_path: Path) -> None:
    whole = point(RunDir(tmp_path).checkpoints, 3)
    (point(RunDir(tmp_path).checkpoints, 6) / "meta.json").unlink()
    point(RunDir(tmp_path).checkpoints, 9).rename(tmp_path / "checkpoints/step-9.partial")
    found = find(tmp_path)
    assert found is not None
    assert found.path == whole


def spoilt(**changes: object) -> Callable[[Path], object]:
    """Writes a marker with these fields changed."""
    record = {"format": 1, "label": 6, "completed": 7, **changes}
    return lambda directory: (directory / "meta.json").write_text(json.dumps(record))


BROKEN = {
    "no JSON": (lambda d: (d / "meta.json").write_text("{"), r"step-6/meta\.json cannot be read"),
    "no object": (
        lambda d: (d / "meta.json").write_text("[]"),
        r"step-6/meta\.json cannot be read",
    ),
    "no numbers": (spoilt(completed="x"), r"cannot be read \(completed is 'x'\)"),
    "endless": (spoilt(completed=float("inf")), "cannot be read"),
    "before the start": (spoilt(completed=-5), r"completed is -5"),
    "neither true nor false": (spoilt(completed=True), "completed is True"),
    "deep": (lambda d: (d / "meta.json").write_text("[" * 200_000), "cannot be read"),
    "another label": (spoilt(label=6, completed=9), "label is 6 and completed 9"),
    "another name": (spoilt(label=2, completed=3), "step-6 holds label 2: rename it to step-2"),
    "ranks": (spoilt(world_size=10**12), "world_size is 1000000000000"),
    "a way out": (spoilt(files={"../../x": [1, "0"]}), "which is no file of the checkpoint"),
    "a long name": (spoilt(files={"x" * 5000: [1, "0"]}), "which is no file of the checkpoint"),
    "half a character": (spoilt(files={"\ud800": [1, "0"]}), "which is no file of the checkpoint"),
    "endless size": (spoilt(files={"a": [float("inf"), "0"]}), "no size of a"),
    "text for an object": (spoilt(model="x"), "model is no object"),
    "text for a list": (spoilt(dropped_updates="xx"), "dropped_updates is 'xx'"),
    "no marker": (lambda d: (d / "meta.json").unlink(), r"step-6 has no meta\.json"),
    "missing file": (lambda d: (d / "a").unlink(), "step-6/a is missing"),
    "wrong size": (lambda d: (d / "a").write_text("abcd"), "a has 4 bytes, 3 were written"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_checkpoint_is_passed_over_with_its_reason_and_left_alone(
    tmp_path: Path, damage: str
) -> None:
    spoil, words = BROKEN[damage]
    older = point(RunDir(tmp_path).checkpoints, 3)
    newest = point(RunDir(tmp_path).checkpoints, 6, files={"a": [3, "0"]})
    (newest / "a").write_text("abc")
    run = RunConfig(data=Path("data"), out=tmp_path)
    assert resume.find(run)[0].path == newest
    spoil(newest)
    found, passed_over = resume.find(run)
    assert found is not None
    assert found.path == older
    assert list(passed_over) == [newest]
    assert re.search(words, passed_over[newest])
    assert newest.is_dir()


def test_a_newer_one_that_this_user_may_not_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole: a start from the one before would set it aside and lose its steps."""
    points = [
        point(RunDir(tmp_path).checkpoints, label, files={"a": [3, "0"]}) for label in (3, 6, 9)
    ]
    for path in points:
        (path / "a").write_text("abc")
    allowed = dict.fromkeys(points, True)
    monkeypatch.setattr("os.access", lambda path, mode: allowed[Path(path).parent])
    allowed[points[1]] = False
    assert find(tmp_path).completed == 10
    allowed[points[2]] = False
    with pytest.raises(PermissionError, match="step-9/a"):
        find(tmp_path)


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_again_from_zero(
    tmp_path: Path,
) -> None:
    for label in (3, 6):
        point(RunDir(tmp_path).checkpoints, label, format=2)
    with pytest.raises(CheckpointError, match=r"2 checkpoints and none is whole .*format 2"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("keep", "stay"), [(2, [30, 40]), (1, [40]), (0, [10, 20, 30, 40]), (9, [10, 20, 30, 40])]
)
def test_the_newest_checkpoints_stay(tmp_path: Path, keep: int, stay: list[int]) -> None:
    for label in (10, 20, 30, 40):
        point(tmp_path, label)
    checkpoint.prune(tmp_path, keep, lambda label: False)
    assert labels_in(tmp_path) == stay


def test_a_checkpoint_that_is_still_needed_stays(tmp_path: Path) -> None:
    for label in (10, 20, 30, 40):
        point(tmp_path, label)
    checkpoint.prune(tmp_path, 2, lambda label: label == 10)
    assert labels_in(tmp_path) == [10, 30, 40]


def test_a_temporary_checkpoint_goes_once_a_newer_save_is_whole(tmp_path: Path) -> None:
    for label in (4, 5):
        point(tmp_path, label)
    checkpoint.drop_temporary(tmp_path, 5)
    assert labels_in(tmp_path) == [5]
    checkpoint.drop_temporary(tmp_path, None)
    assert labels_in(tmp_path) == []


def test_what_a_killed_run_was_writing_goes_and_its_only_copy_stays(tmp_path: Path) -> None:
    """`publish` renames step-3 away and the new one in: it may have been killed in between."""
    for name in ("step-5.partial", "step-4", "step-4.replaced", "step-3.replaced", "other.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-3.replaced/meta.json").write_text("old")
    (tmp_path / "step-3.partial").mkdir()
    checkpoint.discard_leftovers(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["other.partial", "step-3", "step-4"]
    assert (tmp_path / "step-3/meta.json").read_text() == "old"
    checkpoint.discard_leftovers(tmp_path / "nothing")


def test_a_checkpoint_that_has_only_the_name_of_its_replacement_is_taken(tmp_path: Path) -> None:
    """Killed between the two renames of `publish`, where nothing may be renamed before it reads."""
    point(RunDir(tmp_path).checkpoints, 3)
    replaced = point(RunDir(tmp_path).checkpoints, 6).rename(
        RunDir(tmp_path).checkpoints / "step-6.replaced"
    )
    (RunDir(tmp_path).checkpoints / "step-6.partial").mkdir()
    found = find(tmp_path)
    assert found is not None
    assert (found.path, found.completed) == (replaced, 7)
    checkpoint.discard_leftovers(RunDir(tmp_path).checkpoints)
    assert labels_in(RunDir(tmp_path).checkpoints) == [3, 6]
    assert find(tmp_path).path == step_dir(RunDir(tmp_path).checkpoints, 6)


DELETIONS: dict[str, Callable[[Path], None]] = {
    "prune": lambda parent: checkpoint.prune(parent, 1, lambda label: False),
    "drop_temporary": lambda parent: checkpoint.drop_temporary(parent, 20),
}


@pytest.mark.parametrize("delete", DELETIONS)
def test_a_kill_while_a_checkpoint_is_deleted_leaves_what_the_next_start_removes(
    tmp_path: Path, delete: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in (10, 20):
        point(tmp_path, label)

    def killed(path: Path) -> None:
        if path.exists():
            (path / "meta.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "discard", killed)
        with pytest.raises(KeyboardInterrupt):
            DELETIONS[delete](tmp_path)
    assert labels_in(tmp_path) == [20]
    assert len(list(tmp_path.iterdir())) == 2
    checkpoint.discard_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-20"]


def test_a_checkpoint_that_cannot_be_deleted_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in (10, 20):
        point(tmp_path, label)

    def refused(path: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(checkpoint, "discard", refused)
    checkpoint.prune(tmp_path, 1, lambda label: False)
    assert "step-10 cannot be deleted: read-only" in capsys.readouterr().out
    assert labels_in(tmp_path) == [10, 20]


def test_a_rank_file_without_a_hash_is_taken_only_by_size(tmp_path: Path) -> None:
    """A marker that lists nothing would vouch for anything."""
    older = point(RunDir(tmp_path).checkpoints, 3)
    newest = point(RunDir(tmp_path).checkpoints, 6)
    (newest / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"anything")
    run = RunConfig(data=Path("data"), out=tmp_path)
    found, passed_over = resume.find(run)
    assert found is not None
    assert found.path == older
    assert "rank_0_mp_rank_00_optim_states.pt is not listed" in passed_over[newest]
    by_size = RunConfig(data=Path("data"), out=tmp_path, verify_on_resume="size")
    assert resume.find(by_size)[0].path == newest
    with pytest.raises(CheckpointError, match="--verify-on-resume size takes it"):
        resume.find(RunConfig(data=Path("data"), out=tmp_path, resume=str(newest)))


@pytest.mark.parametrize("world", ["2", "3"])
def test_a_marker_that_was_changed_is_passed_over(tmp_path: Path, world: str) -> None:
    point(RunDir(tmp_path).checkpoints, 3)
    newest = point(RunDir(tmp_path).checkpoints, 6) / "meta.json"
    meta = {**json.loads(newest.read_text()), "world_size": 2}
    newest.write_text(sealed_json(meta).replace('"world_size": 2', f'"world_size": {world}'))
    found, passed_over = resume.find(RunConfig(data=Path("data"), out=tmp_path))
    assert found is not None
    assert found.completed == (7 if world == "2" else 4)
    assert all("step-6/meta.json was changed" in why for why in passed_over.values())


def test_only_the_last_step_of_a_finished_run_is_its_end(tmp_path: Path) -> None:
    parent = RunDir(tmp_path).checkpoints
    point(parent, 6)
    newest = point(parent, 9)
    assert not find(tmp_path).is_end
    (tmp_path / "finished").write_text('{"completed": 10}')
    assert find(tmp_path).is_end
    branch = RunConfig(data=Path("data"), out=tmp_path / "branch", resume=str(newest))
    assert not resume.find(branch)[0].is_end
    (newest / "meta.json").unlink()
    assert not find(tmp_path).is_end


def test_a_finished_run_needs_no_whole_checkpoint(tmp_path: Path) -> None:
    (point(RunDir(tmp_path).checkpoints, 9) / "meta.json").write_text("damaged")
    with pytest.raises(CheckpointError, match="none is whole"):
        find(tmp_path)
    (tmp_path / "finished").write_text('{"completed": 10}')
    assert find(tmp_path) is None
