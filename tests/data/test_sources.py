"""A file gives every row with its place, and its hash; a damaged one is an error, not a short one."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ds_sft.data import json_array, rows
from ds_sft.data.sources import TextSource
from ds_sft.errors import DataError

def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    raw = b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"b": 2}'
    path.write_bytes(raw)
    reader = TextSource(path)
    assert list(reader) == [(1, b'{"a": 1}\n'), (4, b'{"b": 2}')]
    assert reader.sha256 == hashlib.sha256(raw).hexdigest()
    assert reader.num_bytes == len(raw)


@pytest.mark.parametrize("size", [7, 8, 9, 15, 16, 17, 40])
def test_a_line_over_the_limit_is_skipped_and_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 8)
    path = tmp_path / "chats.jsonl"
    raw = b"a\n" + b"x" * size + b"\nb\n" + b"y" * size
    path.write_bytes(raw)
    reader = TextSource(path)
    lines = dict(reader)
    assert lines[1] == b"a\n"
    assert lines[3] == b"b\n"
    assert lines[2] == (b"x" * 7 + b"\n" if size == 7 else None)
    assert lines[4] == (b"y" * size if size <= 8 else None)
    assert reader.sha256 == hashlib.sha256(raw).hexdigest()


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read: No such file"):
        list(TextSource(tmp_path / "nowhere.jsonl"))
