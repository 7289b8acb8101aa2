"""The walk to the newest whole checkpoint, with the hashes of real files and a group of one."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import torch

from ds_sft.data.sealed import sealed_json
from ds_sft.errors import CheckpointError, ConfigError
from ds_sft.run import resume
from ds_sft.run.layout import RunDir, labels_in, step_dir
from ds_sft.run.proved_point import proved
from ds_sft.run.resume import ResumePoint
from ds_sft.run.seal import seal
from ds_sft.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("process_group")
STATES = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
CPU = torch.device("cpu")


def point(out: Path, label: int, temporary: bool = False) -> Path:
    """A checkpoint with one sealed file, as far as this walk reads it."""
    directory = step_dir(RunDir(out).temporary if temporary else RunDir(out).checkpoints, label)
    directory.mkdir(parents=True)
    (directory / STATES).write_bytes(bytes([label]) * 64)
    files = seal(directory, [STATES])
    meta = {"format": 1, "completed": label + 1, "world_size": 1, "files": files}
    (directory / "meta.json").write_text(sealed_json(meta))
    return directory


def walk(out: Path, seen: list[int] | None = None, **changes: str) -> ResumePoint | None:
    """What a start does; `seen` gets the steps of what was held against the run again."""
    run = RunConfig(data=Path("data"), out=out, **changes)  # type: ignore[arg-type]
    checked: list[int] = [] if seen is None else seen
    return proved(resume.find(run)[0], run, CPU, lambda p: checked.append(p.completed))


def test_broken_ones_of_every_kind_are_passed_over_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By size before the first choice, then by hash, by size again, and by hash again."""
    whole, by_hash_2, by_size_2, by_hash, by_size = (
        point(tmp_path, label, temporary=label == 6) for label in (2, 3, 4, 6, 8)
    )
    for path in (by_hash, by_hash_2):
        harness.flip_a_bit(path / STATES)
    (by_size / STATES).write_bytes(b"")
    (by_size_2 / "meta.json").unlink()
    checked: list[int] = []
    found = walk(tmp_path, checked)
    assert found is not None
    assert found.path == whole
    assert labels_in(tmp_path / "checkpoints") == [2]
    assert labels_in(tmp_path / "checkpoints-temp") == []
    assert checked == [4, 3]
    said = capsys.readouterr().out.splitlines()
    for line, (path, why) in zip(
        said,
        {
            by_size: "has 0 bytes, 64 were written",
            by_hash: "another sha256",
            by_size_2: "no meta.json",
            by_hash_2: "another sha256",
        }.items(),
        strict=False,
    ):
        assert line.startswith(f"[init] passed over, now {path}.broken: ")
        assert why in line
        assert path.with_name(f"{path.name}.broken").is_dir()
    assert said[4].startswith(f"[init] {whole} is whole (")


def test_when_all_were_set_aside_no_start_begins_at_step_0(tmp_path: Path) -> None:
    """It would drop the rows of metrics.jsonl, and a scheduler starts again by itself."""
    harness.flip_a_bit(point(tmp_path, 3) / STATES)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no whole checkpoint is left .*step-3\.broken"):
            walk(tmp_path)
    (tmp_path / "finished").write_text("{}")  # it needs none: people delete what is large
    assert walk(tmp_path) is None
    (tmp_path / "finished").unlink()
    (tmp_path / "checkpoints/step-3.broken").rename(tmp_path / "elsewhere")
    assert walk(tmp_path) is None


def test_what_cannot_be_set_aside_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point(tmp_path, 2)
    harness.flip_a_bit(point(tmp_path, 3) / STATES)

    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(
        CheckpointError, match=r"step-3 is not whole and cannot be set aside .*Read"
    ):
        walk(tmp_path)


def test_a_named_checkpoint_is_not_exchanged_for_another(tmp_path: Path) -> None:
    point(tmp_path / "other", 2)
    named = point(tmp_path / "other", 3)
    harness.flip_a_bit(named / STATES)
    with pytest.raises(CheckpointError, match=r"step-3 is not whole: .*another sha256"):
        walk(tmp_path / "new", resume=str(named))
    assert named.is_dir()


def test_by_size_alone_nothing_is_hashed(tmp_path: Path) -> None:
    damaged = point(tmp_path, 3)
    harness.flip_a_bit(damaged / STATES)
    found = walk(tmp_path, verify_on_resume="size")
    assert found is not None
    assert found.path == damaged


def test_an_older_one_of_another_run_is_refused(tmp_path: Path) -> None:
    point(tmp_path, 2)
    harness.flip_a_bit(point(tmp_path, 3) / STATES)
    run = RunConfig(data=Path("data"), out=tmp_path)

    def other_run(found: ResumePoint) -> None:
        raise ConfigError(f"not the run of {found.path}")

    with pytest.raises(ConfigError, match=r"not the run of .*step-2"):
        proved(resume.find(run)[0], run, CPU, other_run)
