"""One row as it is stored -> its shape, and a conversation or a reason why not.

Owns the last step of reading: bytes of JSON, or a Python object from a table, become a row; the
row's shape is recognised, or forced; and whatever is wrong with it becomes a `Rejected`. Invariant:
`parse_row` raises nothing, whatever it is given.

Left to others: where rows come from (`sources`), the shapes (`shapes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_sft.data.records import Conversation, Reject, Rejected, kind, strict_json
from ds_sft.data.shapes import UNKNOWN, recognise, to_conversation

MAX_ROW_BYTES = 64 * 2**20
UNREADABLE = "unreadable"
"""The shape of a row of which not even the keys can be told."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are to be read; the same for all of them."""

    shape: str = ""
    """Name of the shape that every row has; empty: recognised row by row."""
    columns: Mapping[str, str] | None = None
    """Where a key of `shapes.COLUMNS` is found under another name."""
    max_chars: int = 0
    """Most characters in a row's turns, tool calls included; 0: any number."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What became of a row."""

    shape: str
    """The shape that it was read as."""
    result: Conversation | Rejected


ANY = Reading()


Raw = bytes | dict[str, Any] | Rejected | None
"""A row as a source gives it: JSON, a table's row (or why it is none), None for one too long."""


def parse_row(row: Raw, reading: Reading = ANY) -> Parsed:
    """A row as a conversation, or the reason why not."""
    shape = UNREADABLE
    try:
        if isinstance(row, Rejected):
            return Parsed(shape, row)
        if row is None:
            raise Reject("line_too_long", f"more than {MAX_ROW_BYTES // 2**20} MiB in one row")
        found = _decode(row) if isinstance(row, bytes) else row
        named = _renamed(found, reading.columns) if reading.columns else found
        shape = reading.shape or recognise(named)
        if shape == UNKNOWN and reading.columns:
            _refuse_without(reading.columns, list(found))
        result = to_conversation(named, shape)
        if reading.max_chars:
            _refuse_long(result, reading.max_chars)
        return Parsed(shape, result)
    except Reject as reject:
        return Parsed(shape, reject.rejected)
    except RecursionError:
        too_deep = Rejected(reason="json_too_deep", detail="nested beyond what can be read")
        return Parsed(shape, too_deep)


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = strict_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Reject("not_utf8", f"byte {error.start}: {error.reason}") from None
    except ValueError as error:
        raise Reject("not_json", str(error)) from None
    if not isinstance(row, dict):
        raise Reject("not_an_object", f"the row is a {kind(row)}")
    return row


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    found = {key: value for key, value in row.items() if key not in columns}
    for name, column in columns.items():
        if row.get(column) is not None:
            found[name] = row[column]
            if column not in columns:
                found.pop(column, None)
    return found


def _refuse_without(columns: Mapping[str, str], keys: list[str]) -> None:
    """Of a row of no known shape: say which of the columns that flags name it lacks."""
    lacking = [
        f"{column} (--{name}-column)" for name, column in columns.items() if column not in keys
    ]
    if lacking:
        own = ", ".join(map(str, keys[:12])) or "none"
        raise Reject("unknown_shape", f"the row has no {', '.join(lacking)}; its keys are {own}")


def _refuse_long(row: Conversation, limit: int) -> None:
    chars = sum(
        _chars(value)
        for turn in row.messages
        for name, value in turn.items()
        if name not in ("thinking", "reasoning")  # `reasoning_content` once more
    )
    if chars > limit:
        raise Reject("over_max_chars", f"{chars} characters, more than --max-chars {limit}")


def _chars(value: Any) -> int:
    """Characters of all strings in the turns; roles and names are so few that they count too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_chars, value))
    return 0
