"""Which commit a run's code is said to be; a script stands for git, which a machine may lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_sft.run import manifest

COMMIT = "7a03becebc5fa49453fc545090c5cec3c0fa992d"


def git_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ls_files: int, rev_parse: int
) -> None:
    """A git whose commands end with these codes, as in `git -C DIRECTORY COMMAND ...`."""
    script = tmp_path / "git"
    script.write_text(
        '#!/bin/sh\n[ "$1" = -C ] && [ -d "$2" ] || exit 99\n'
        f'case "$3 $4 $5" in\n"ls-files --error-unmatch manifest.py") exit {ls_files};;\n'
        f'"rev-parse HEAD ") echo {COMMIT}; exit {rev_parse};;\nesac\nexit 98\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("ls_files", "rev_parse", "commit"),
    [(0, 0, COMMIT), (1, 0, None), (128, 128, None), (0, 1, None)],
)
def test_the_commit_is_that_of_a_checkout_which_holds_the_code(
    ls_files: int, rev_parse: int, commit: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A repository that only surrounds the environment does not: `ls-files` ends with 1."""
    git_that(tmp_path, monkeypatch, ls_files, rev_parse)
    assert manifest._git_commit() == commit


def test_without_git_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifest._git_commit() is None
