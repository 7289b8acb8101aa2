"""The list of files says of every kind of damage which file it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_sft.errors import CheckpointError
from ds_sft.run.seal import check_hashes, check_sizes, names_in, seal


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        (tmp_path / name).write_text(name * 5)
    return tmp_path


def test_an_untouched_directory_is_whole(directory: Path) -> None:
    files = seal(directory, names_in(directory))
    assert sorted(files) == ["a", "b", "sub/c"]
    check_sizes(directory, files)
    check_hashes(directory, files)


def test_a_missing_file_and_another_size_are_named(directory: Path) -> None:
    files = seal(directory, names_in(directory))
    (directory / "b").write_text("short")
    (directory / "b").write_text("longer than before")
    with pytest.raises(CheckpointError, match=r"b has 18 bytes, 5 were written"):
        check_sizes(directory, files)
    (directory / "b").unlink()
    with pytest.raises(CheckpointError, match=r"b is missing"):
        check_sizes(directory, files)


def test_a_flipped_byte_is_found_by_the_rank_that_reads_the_file(directory: Path) -> None:
    files = seal(directory, names_in(directory))
    (directory / "sub/c").write_text("x" * 25)
    check_sizes(directory, files)
    found = []
    for rank in range(2):
        try:
            check_hashes(directory, files, rank, 2)
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1
    assert "sub/c has another sha256" in found[0]
