"""The list of a directory's files with size and sha256: what makes "whole" checkable.

Owns `checksums.json` of exports and the same list inside a checkpoint's meta.json. Every rank
hashes the files that it wrote, in parallel. Leaves the writing of the files to others.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ds_sft.errors import CheckpointError

CHECKSUMS = "checksums.json"
Files = dict[str, tuple[int, str]]
"""Size in bytes and sha256 by path relative to the directory."""


def seal(directory: Path, names: Iterable[str]) -> Files:
    """Size and hash of the files `names` of `directory`."""
    return {name: (size(directory / name), sha256(directory / name)) for name in names}


def names_in(directory: Path) -> list[str]:
    """Every file below `directory`, relative to it, in order."""
    found = (Path(folder, file) for folder, _, files in os.walk(directory) for file in files)
    return sorted(str(path.relative_to(directory)) for path in found)


def check_sizes(directory: Path, files: Files) -> None:
    """Raise CheckpointError for the first file that is missing or has another size.

    One that this user may not read is not damaged: PermissionError.
    """
    try:
        sizes = {name: int(size) for name, (size, _) in files.items()}
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(f"the list of files of {directory} cannot be read") from None
    for name, expected in sizes.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if size(path) != expected:
            raise CheckpointError(f"{path} has {size(path)} bytes, {expected} were written")


def check_listed(directory: Path, files: Files) -> None:
    """Raise CheckpointError for a rank's file without a hash: it could hold anything."""
    for path in sorted(directory.glob("*_states.pt")):
        if path.name not in files:
            raise CheckpointError(
                f"{path} is not listed in the marker: it cannot be checked "
                "(--verify-on-resume size takes it as it is)"
            )


def check_hashes(directory: Path, files: Files, share: int = 0, of: int = 1) -> None:
    """Raise CheckpointError for a changed file; rank `share` of `of` ranks reads its part."""
    for name in sorted(files)[share::of]:
        if sha256(directory / name) != files[name][1]:
            raise CheckpointError(f"{directory / name} has another sha256 than when it was written")


def size(path: Path) -> int:
    """Size of a file in bytes."""
    return path.stat().st_size


def sha256(path: Path) -> str:
    """Hash of a file's content. Raises CheckpointError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
