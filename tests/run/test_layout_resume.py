"""The run directory without torch: names, what is whole, what goes and what stays."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_sft.errors import CheckpointError
from ds_sft.flags import RunConfig
from ds_sft.run import checkpoint, resume
from ds_sft.run.layout import RunDir, labels_in, step_dir


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
    for name in ("step-9", "step-10", "step-11.partial", "step-8.replaced", "step-x", "other"):
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


BROKEN = {
    "no JSON": (lambda d: (d / "meta.json").write_text("{"), r"step-6/meta\.json cannot be read"),
    "no object": (
        lambda d: (d / "meta.json").write_text("[]"),
        r"step-6/meta\.json cannot be read",
    ),
    "no numbers": (lambda d: (d / "meta.json").write_text('{"completed": "x"}'), "cannot be read"),
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
    checkpoint.discard_leftovers(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["other.partial", "step-3.replaced", "step-4"]
    checkpoint.discard_leftovers(tmp_path / "nothing")
