"""Atomic writes: a file or a directory appears under its final name whole, or not at all.

Owns the `X.partial` convention of the run directory: everything is written beside its final name,
brought to disk with fsync, and renamed. Invariants: a final name never holds half a result, not
even after a power cut; a leftover `X.partial` is never read by anybody and may be deleted.

Leaves to others what is written and which rank writes it; nothing here talks to other processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"


def partial_path(path: Path) -> Path:
    """Return the name under which `path` is written until it is whole."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def replaced_path(path: Path) -> Path:
    """Return the name that an older directory has while its successor takes `path`."""
    return path.with_name(path.name + REPLACED_SUFFIX)


def fsync_path(path: Path) -> None:
    """Bring a file's bytes, or a directory's list of names, to disk.

    Raises OSError: this is where many file systems report a full disk for the first time.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file through `X.partial`; readers see the old content or the new one."""
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # on a full disk its bytes are missed elsewhere
        raise
    fsync_path(path.parent)


def fresh_partial(final: Path) -> Path:
    """Create an empty `final.partial` directory, dropping what an earlier attempt left there."""
    partial = partial_path(final)
    discard(partial)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, final: Path) -> None:
    """Rename a whole directory to its final name, after bringing everything in it to disk.

    A directory that already has the final name is replaced. POSIX cannot swap two directories, so
    there is an instant in which only `final.replaced` and `final.partial`, both whole, exist;
    after a kill in it, `bring_back` makes the older one `final` again.
    """
    for folder, _, names in os.walk(partial):
        for name in names:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
    replaced = replaced_path(final)
    if final.exists():
        discard(replaced)
        final.rename(replaced)
    partial.rename(final)
    fsync_path(final.parent)
    discard(replaced)


def bring_back(replaced: Path) -> None:
    """End what a killed `publish` began: `final.replaced` is `final` again, or not needed."""
    final = replaced.with_name(replaced.name.removesuffix(REPLACED_SUFFIX))
    if final.exists():
        discard(replaced)
    else:
        replaced.rename(final)
        fsync_path(final.parent)


def discard(path: Path) -> None:
    """Delete a file or a directory; not being there is fine, not being deletable is an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield `final.partial`, empty; publish it when the block ends, delete it when it raises."""
    partial = fresh_partial(final)
    try:
        yield partial
        publish(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
