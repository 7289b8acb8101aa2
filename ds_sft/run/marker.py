"""The markers: meta.json of a whole native checkpoint, and `finished` of a whole run.

Owns the former's name, its format and the types of its fields. Invariant: what `read_meta` returns
can be used without a second look; anything else is a CheckpointError, since a marker may come from
a bad disk or from somebody else. Leaves the meaning of the fields to their users. No torch.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from ds_sft.data.sealed import is_damaged
from ds_sft.errors import CheckpointError
from ds_sft.run.layout import RunDir

META_NAME = "meta.json"
FORMAT = 1
MAX_RANKS = 1_000_000
MAX_NAME = 255  # of a file, in bytes


def read_meta(path: Path) -> dict[str, Any]:
    """The marker in the checkpoint directory `path`. Raises CheckpointError.

    What this user may not read is not damaged: PermissionError.
    """
    file = path / META_NAME
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: name RUN/checkpoints/step-N")
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no {META_NAME}: it is no native checkpoint, or was not written to its "
            "end: name a whole one, RUN/checkpoints/step-N"
        )
    try:
        raw = file.read_bytes()
        if is_damaged(raw):
            raise CheckpointError(f"{file} was changed after it was written")
        meta = json.loads(raw)
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error!r})") from None
    if not isinstance(meta, dict):
        raise CheckpointError(f"{file} cannot be read (it is no JSON object)")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {meta.get('format')!r}, this version reads {FORMAT}"
        )
    wrong = _wrong_field(meta)
    if wrong:
        raise CheckpointError(f"{file} cannot be read ({wrong[:200]})")
    return meta


def read_finished(run_dir: RunDir) -> int | None:
    """Completed steps of a finished run, None while the marker is not there (or says nothing)."""
    try:
        return int(json.loads(run_dir.finished.read_text(encoding="utf-8"))["completed"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _wrong_field(meta: dict[str, Any]) -> str:
    """Which field cannot be used, and why; empty when all can. Only `completed` must be there."""
    completed: Any = meta.get("completed")
    if not _is_count(completed, 1, 2**53):
        return f"completed is {completed!r}"
    if meta.get("label", completed - 1) != completed - 1:
        return f"label is {meta['label']!r} and completed {completed}: completed must be label + 1"
    if not _is_count(meta.get("world_size", 1), 1, MAX_RANKS):
        return f"world_size is {meta['world_size']!r}"
    for name in ("recipe", "model", "fingerprint", "versions", "files"):
        if not isinstance(meta.get(name, {}), dict):
            return f"{name} is no object"
    if not isinstance(meta.get("model", {}).get("config.json", {}), dict):
        return "model.config.json is no object"
    if not isinstance(meta.get("data_manifest_sha256", ""), str):
        return "data_manifest_sha256 is no text"
    dropped = meta.get("dropped_updates", [0, 0])
    if not (isinstance(dropped, list) and len(dropped) == 2):
        return f"dropped_updates is {dropped!r}"
    if not all(_is_count(number, 0, completed) for number in dropped):
        return f"dropped_updates is {dropped!r}"
    return next(filter(None, map(_wrong_file, meta.get("files", {}).items())), "")


def _is_count(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _wrong_file(item: tuple[str, Any]) -> str:
    """A file of the list that cannot be one of a checkpoint's own."""
    name, entry = item
    parts = PurePosixPath(name).parts
    try:
        fits = all(len(part.encode()) <= MAX_NAME and "\0" not in part for part in parts)
    except UnicodeEncodeError:
        fits = False
    if not parts or name.startswith("/") or ".." in parts or not fits:
        return f"files names {name[:60]!r}, which is no file of the checkpoint"
    good = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
    return "" if good and _is_count(entry[0], 0, 2**63) else f"files has no size of {name}"
