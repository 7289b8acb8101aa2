"""Which commit a run's code is said to be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ds_sft.run import manifest


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's repository, with this code in an environment inside it that git ignores."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    code = tmp_path / ".venv/site-packages/ds_sft/run/manifest.py"
    code.parent.mkdir(parents=True)
    code.write_text("")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".gitignore")
    commit(tmp_path)
    monkeypatch.setattr(manifest, "__file__", str(code))
    return tmp_path


def git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", where, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(where: Path) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    git(where, *who, "commit", "-q", "-m", "one")


def test_the_commit_of_a_repository_around_the_environment_is_not_the_codes(
    repository: Path,
) -> None:
    assert manifest._git_commit() is None


def test_the_commit_of_a_checkout_that_holds_the_code_is(repository: Path) -> None:
    git(repository, "add", "-f", manifest.__file__)
    commit(repository)
    assert manifest._git_commit() == git(repository, "rev-parse", "HEAD")


def test_without_git_or_with_one_that_cannot_be_read_there_is_none(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "add", "-f", manifest.__file__)
    commit(repository)
    (repository / ".git/HEAD").write_text("garbage")
    assert manifest._git_commit() is None
    monkeypatch.setenv("PATH", str(repository))
    assert manifest._git_commit() is None
