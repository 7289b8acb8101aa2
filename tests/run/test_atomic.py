from __future__ import annotations

from pathlib import Path

import pytest

from ds_sft.run.atomic import (
    atomic_directory,
    bring_back,
    fresh_partial,
    partial_path,
    publish,
    replaced_path,
    write_file,
)


def test_a_file_is_replaced_and_no_partial_stays(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    write_file(target, "old")
    write_file(target, b"new")
    assert target.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "run.json"
    write_file(target, "old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_directory_has_its_name_only_after_the_block(tmp_path: Path) -> None:
    final = tmp_path / "step-3"
    with atomic_directory(final) as partial:
        (partial / "a").write_text("1")
        assert not final.exists()
    assert (final / "a").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]


def test_an_error_leaves_neither_name(tmp_path: Path) -> None:
    def write_half() -> None:
        with atomic_directory(tmp_path / "x") as partial:
            (partial / "a").write_text("1")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_older_directory_as_it_was(tmp_path: Path) -> None:
    final = tmp_path / "x"
    final.mkdir()
    (final / "a").write_text("old")
    with pytest.raises(RuntimeError, match="disk"), atomic_directory(final):
        raise RuntimeError("disk")
    assert (final / "a").read_text() == "old"


def test_publish_replaces_a_directory_with_everything_in_it(tmp_path: Path) -> None:
    final = tmp_path / "x"
    final.mkdir()
    (final / "old").write_text("old")
    partial = fresh_partial(final)
    (partial / "sub").mkdir()
    (partial / "sub" / "new").write_text("new")
    publish(partial, final)
    assert [str(p.relative_to(final)) for p in final.rglob("*")] == ["sub", "sub/new"]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_the_rest_of_an_earlier_attempt_is_dropped(tmp_path: Path) -> None:
    final = tmp_path / "x"
    (fresh_partial(final) / "rest").write_text("")
    assert list(fresh_partial(final).iterdir()) == []
    assert partial_path(final).name == "x.partial"


def test_the_only_copy_comes_back_and_a_replaced_one_goes(tmp_path: Path) -> None:
    final = tmp_path / "x"
    for content in ("only", "old"):
        replaced_path(final).mkdir()
        (replaced_path(final) / "a").write_text(content)
        bring_back(replaced_path(final))
        assert (final / "a").read_text() == "only"
        assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_publish_spares_the_only_copy_until_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "x"
    replaced_path(final).mkdir()
    partial = fresh_partial(final)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(partial, final)
    assert replaced_path(final).is_dir()
    publish(partial, final)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
