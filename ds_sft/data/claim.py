"""Whose a directory beside a data set is: prepare's, and of which process; or a person's.

Owns the layout by which prepare knows its own directories, and the lock on the one being written.
Invariants: what holds a file that prepare does not write is never taken over; one process at a time
holds a partial directory; a lock ends with its process, however that ends.

Left to others: what is written, and what is deleted (`packed_writer`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from pathlib import Path

from ds_sft.data.packed import ARRAY_DTYPES, MANIFEST, TOKENIZER_DIR, VALIDATION_DIR
from ds_sft.errors import DataError

PARTIAL_SUFFIX = ".partial"
LOCK = ".prepare.lock"
"""A file in the partial directory, locked while it is written to; it names the process."""

_ARRAYS = frozenset(f"{name}.npy" for name in ARRAY_DTYPES)
_LAYOUT = _ARRAYS.union(
    [MANIFEST, LOCK, TOKENIZER_DIR, VALIDATION_DIR, VALIDATION_DIR + PARTIAL_SUFFIX]
)


def foreign(root: Path) -> str:
    """What shows that prepare did not make all of a directory; empty: it did, or it is empty."""
    if root.is_symlink() or not root.is_dir():
        return "is no directory of its own"
    names = {entry.name for entry in root.iterdir()}
    if strangers := sorted(names - _LAYOUT):
        return f"holds {strangers[0]}, which is no file of a data set"
    if MANIFEST in names and not _is_ours(root / MANIFEST):
        return f"has a {MANIFEST} that is not a data set's"
    if names and names.isdisjoint([LOCK, *_ARRAYS]):
        return "holds no array of a data set"
    inside = foreign(root / VALIDATION_DIR) if VALIDATION_DIR in names else ""
    return f"has a directory {VALIDATION_DIR} that {inside}" if inside else ""


def _is_ours(manifest: Path) -> bool:
    try:
        facts = json.loads(manifest.read_bytes())
    except ValueError:
        return False
    return isinstance(facts, dict) and isinstance(facts.get("max_seq_len"), int)


def claim(partial: Path, out: Path) -> int:
    """Make the partial directory of `out`, or empty that of a dead process; its lock as a file.

    Raises DataError if it is in use, or not prepare's.
    """
    while True:
        _check_claimable(partial)
        handle = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode("utf-8", "replace")
            os.close(handle)
            raise DataError(
                f"another prepare ({holder or 'just started'}) is writing {out}: wait until it "
                "ends, or choose another --out"
            ) from None
        if _is_still(partial / LOCK, handle):
            break
        os.close(handle)
    for entry in partial.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return handle


def _check_claimable(partial: Path) -> None:
    if not os.path.lexists(partial):
        partial.mkdir(parents=True, exist_ok=True)
    reason = foreign(partial)
    if not reason and any(partial.iterdir()) and not (partial / LOCK).is_file():
        reason = f"holds no {LOCK} of a prepare"
    if reason:
        raise DataError(
            f"{partial} is in the way and {reason}: move it away, or choose another --out"
        )


def _is_still(path: Path, handle: int) -> bool:
    """Whether the open file has that name yet: its holder may have ended while we waited."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
