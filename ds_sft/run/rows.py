"""metrics.jsonl: one JSON object a line, which reads as one run however often it was started.

Owns the file. Invariants: every line is whole; no label has two rows of steps; a full disk loses no
row while the process lives. Leaves what is in a row to `metrics`. No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_sft.errors import CheckpointError
from ds_sft.run.atomic import write_file


class RowFile:
    """A file of JSON lines that outlives a full disk: rows wait in memory until there is room."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._told = False

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, with those that could not be written before."""
        self._waiting += json.dumps(row).encode() + b"\n"
        if not self._write() and not self._told:
            self._told = True
            name = self._file.name
            print(f"[metrics] {name} cannot be written; its rows wait in memory", flush=True)

    def _write(self) -> bool:
        end = self._file.seek(0, 2)
        try:
            written = self._file.write(self._waiting)
        except OSError:
            written = 0
        if written == len(self._waiting):
            self._waiting = b""
            return True
        self._file.truncate(end)  # no half line
        return False

    def close(self) -> None:
        """Close the file, after a last try for rows that wait."""
        if self._waiting and not self._write():
            lost = self._waiting.count(b"\n")
            print(f"[metrics] {lost} rows of {self._file.name} could not be written", flush=True)
        self._file.close()


def open_rows(path: Path, first: int) -> RowFile:
    """The file without the rows from step `first` on, which come again. Raises CheckpointError."""
    try:
        dropped = keep_before(path, first)
        rows = RowFile(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}: make room and start again"
        ) from None
    if dropped:
        print(f"[init] {dropped} rows of {path} come again, from step {first}", flush=True)
    return rows


def keep_before(path: Path, label: int) -> int:
    """Drop the rows from `label` on, which a resumed run writes again, and a torn last line.

    Returns the number of the former.
    """
    if not path.is_file():
        return 0
    rows = rows_in(path)
    kept = [row for row in rows if row["label"] < label]
    write_file(path, "".join(json.dumps(row) + "\n" for row in kept))
    return len(rows) - len(kept)


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without torn ones."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("label"), int):
            rows.append(row)
    return rows
