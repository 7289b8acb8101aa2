"""A file gives every row with its place; a damaged one is an error, never a shorter one."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ds_sft.data import rows
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


ROWS = [{"a": number, "text": "x" * number} for number in range(300)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def compressed(kind: str, data: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor(write_content_size=False).compress(data) if kind else data


def read(path: Path) -> list[Any]:
    return [json.loads(row or b"") for _, row in TextSource(path)]


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
@pytest.mark.parametrize(
    "data", [LINES, json.dumps(ROWS).encode(), json.dumps(ROWS, indent=1).encode()]
)
def test_lines_and_arrays_give_the_same_rows_however_compressed(
    tmp_path: Path, kind: str, data: bytes
) -> None:
    path = tmp_path / f"chats.json{kind and '.' + kind}"
    path.write_bytes(compressed(kind, data))
    source = TextSource(path)
    assert [place for place, _ in source] == list(range(1, 301))
    assert read(path) == ROWS
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source.num_bytes == path.stat().st_size == source.size
    assert source.count_rows() == 300


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_parts_that_were_compressed_one_by_one_are_read_to_the_end(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"chats.jsonl.{kind}"
    path.write_bytes(compressed(kind, LINES) * 3)
    assert read(path) == ROWS * 3


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_short_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"chats.jsonl.{kind}"
    whole = compressed(kind, LINES)
    for size in (1, 5, 20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=r"chats\.jsonl\.\w+ is damaged after row \d+ \("
        ) as caught:
            list(TextSource(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_file_with_wrong_bytes_is_never_read_as_a_whole_one(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"chats.jsonl.{kind}"
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(LINES)
    whole = gzip.compress(LINES, mtime=0) if kind == "gz" else checked
    rng = np.random.default_rng(0)
    for place in rng.integers(12, len(whole), 60).tolist():
        wrong = bytearray(whole)
        wrong[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(wrong))
        with contextlib.suppress(DataError):
            read = [row for _, row in TextSource(path)]
            assert read == LINES.splitlines(keepends=True), f"bit of byte {place}"


def test_what_is_not_compressed_at_all_is_an_error(tmp_path: Path) -> None:
    for kind in ("gz", "zst"):
        path = tmp_path / f"chats.jsonl.{kind}"
        path.write_bytes(LINES)
        with pytest.raises(DataError, match="is damaged after row 0"):
            list(TextSource(path))


@pytest.mark.parametrize("log_of_window", [27, 28, 31])
def test_a_zstd_frame_with_a_long_window_is_whole(tmp_path: Path, log_of_window: int) -> None:
    data = b'{"a": 1}\n'
    window = bytes([(log_of_window - 10) << 3])
    last_raw_block = (len(data) << 3 | 1).to_bytes(3, "little")
    path = tmp_path / "chats.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + window + last_raw_block + data)
    assert read(path) == [{"a": 1}]


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "chats"])
def test_a_file_of_another_kind_than_its_name_says_is_named(
    tmp_path: Path, kind: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"PAR1\x15\x04" if kind == "parquet" else compressed(kind, LINES))
    with pytest.raises(DataError, match=rf"{name} is a \.{kind} file by its first bytes"):
        list(TextSource(path))


def test_utf_16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(LINES.decode().encode("utf-16"))
    with pytest.raises(DataError, match=r"chats\.jsonl is UTF-16 by its first bytes: convert it"):
        list(TextSource(path))


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("chats.jsonl", ROWS, r"let its name end in \.json"),
        ("chats.jsonl", ROWS[0], "write a row a line"),
        ("chats.json", ROWS[0], "write a row a line"),
    ],
)
def test_json_over_several_lines_is_no_json_lines(
    tmp_path: Path, kind: str, name: str, value: Any, advice: str
) -> None:
    path = tmp_path / f"{name}{kind and '.' + kind}"
    path.write_bytes(compressed(kind, b"\xef\xbb\xbf\n" + json.dumps(value, indent=1).encode()))
    with pytest.raises(DataError, match=f"holds JSON over several lines.*{advice}"):
        list(TextSource(path))


@pytest.mark.parametrize("first", [b"{", b"[1]", b"[", b"{ "])
def test_a_bad_first_line_costs_one_row(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(first + b'{"a": 1}\n{"a": 2}\n')
    assert len(list(TextSource(path))) == 2


def test_an_array_that_does_not_end_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_bytes(b'[{"a": 1}, {"a": 2}, {"a"')
    with pytest.raises(DataError, match=r"damaged after row 2 \(the array does not end\)"):
        list(TextSource(path))


def test_an_array_may_follow_blanks_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_bytes(b'\xef\xbb\xbf \n\n[{"a": 1}]\n')
    assert read(path) == [{"a": 1}]
    path.write_bytes(b" " * (2**18 + 5) + b'[{"a": 1}]')
    assert read(path) == [{"a": 1}]


def test_a_name_that_is_no_utf8_can_be_printed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    path.write_bytes(b"{}\n")
    source = TextSource(path)
    assert list(source) == [(1, b"{}\n")]
    source.facts()["path"].encode("utf-8")
