"""Files of JSON -> their rows as bytes, with the hash of the file once all is read.

Owns JSON lines and JSON arrays, plain, gzip or zstd. Invariants: one row at a time in memory; a
damaged or shortened file is an error that names the file and the place, never a shorter file; one
whose name does not say what it holds is an error that says it.

Left to others: what a row holds (`rows`), tables (`tables`), which files (`inputs`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ds_sft.data import json_array, rows
from ds_sft.errors import DataError

BLOCK_BYTES = 2**18
USUAL_RATIO = 4
"""Bytes of text behind a byte of a compressed file, about."""
_BOM = b"\xef\xbb\xbf"
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_LARGEST_WINDOW = 2**31
"""Of a zstd frame, in bytes: what the format's own tool writes at most, with --long=31."""
_SPREAD = re.compile(rb"\[\s*\n|\{\s*\n\s*\"")
"""How a value begins that is printed over several lines."""


class TextSource:
    """The rows of one file as bytes. Iterating again reads the file again."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if there is no such file."""
        self.path = path
        self.name = printable(path)
        self.num_bytes = 0
        self.num_lines = 0
        self.sha256 = ""
        self._counted: int | None = None
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror}") from None
        is_packed = path.suffix.lower() in (".gz", ".zst")
        self.text_size = self.size * (USUAL_RATIO if is_packed else 1)

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (place from 1, row); None for a row over rows.MAX_ROW_BYTES, blank lines not.

        The place is the line, in an array the number of the element. Raises DataError if the file
        cannot be read to its end.
        """
        self.num_bytes = self.num_lines = 0
        try:
            with self.path.open("rb", buffering=0) as file:
                self._refuse_other_kinds(file)
                hashing = _Hashing(self, file)
                yield from self._rows(_decompressed(hashing, self.path.suffix))
                self.sha256 = hashing.digest.hexdigest()
        except (gzip.BadGzipFile, EOFError, zlib.error, _Damaged, json_array.BrokenArray) as error:
            raise DataError(
                f"{self.name} is damaged after row {self.num_lines} ({error}): get the file again"
            ) from None
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror}") from None

    def count_rows(self) -> int:
        """Reads the file, once."""
        if self._counted is None:
            self._counted = sum(1 for _ in self)
        return self._counted

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the file, once it is read."""
        return {
            "path": self.name,
            "bytes": self.num_bytes,
            "lines": self.num_lines,
            "sha256": self.sha256,
        }

    def _refuse_other_kinds(self, file: io.RawIOBase) -> None:
        start = file.read(4) or b""
        file.seek(0)
        if start.startswith(_UTF_16):
            raise DataError(
                f"{self.name} is UTF-16 by its first bytes: convert it (iconv -f UTF-16 -t UTF-8)"
            )
        for magic, suffix in _MAGIC.items():
            if start.startswith(magic) and suffix != self.path.suffix.lower():
                raise DataError(
                    f"{self.name} is a {suffix} file by its first bytes: let its name end so"
                )

    def _rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        start = self._start()
        may_be_array = ".json" in [suffix.lower() for suffix in self.path.suffixes[-2:]]
        if may_be_array and start.startswith(b"["):
            for element in json_array.elements(file, rows.MAX_ROW_BYTES):
                self.num_lines += 1
                yield self.num_lines, element
            return
        if _SPREAD.match(start):
            raise DataError(
                f"{self.name} holds JSON over several lines where each line is to be a row: "
                + ("let its name end in .json" if start.startswith(b"[") else "write a row a line")
            )
        yield from self._lines(file)

    def _start(self) -> bytes:
        """The first bytes that are not blank."""
        with self.path.open("rb", buffering=0) as raw:
            file = _decompressed(raw, self.path.suffix)
            start = file.read(BLOCK_BYTES).removeprefix(_BOM)
            while start and not start.strip():
                start = file.read(BLOCK_BYTES)
        return start.lstrip()

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        limit = rows.MAX_ROW_BYTES
        while line := file.readline(limit):
            too_long = False
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(limit)
                too_long = too_long or bool(rest)
            self.num_lines += 1
            if self.num_lines == 1:
                line = line.removeprefix(_BOM)
            if too_long:
                yield self.num_lines, None
            elif line.strip():
                yield self.num_lines, line


def printable(path: Path) -> str:
    """The path as text that any file can hold, also if its name is no UTF-8."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _decompressed(file: io.RawIOBase, suffix: str) -> BinaryIO:
    suffix = suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=cast(BinaryIO, file), mode="rb"))
    return io.BufferedReader(_Unzstd(file) if suffix == ".zst" else file, BLOCK_BYTES)


class _Hashing(io.RawIOBase):
    """A file as it is read, its bytes counted and hashed on the way."""

    def __init__(self, source: TextSource, file: io.RawIOBase) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._source = source
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._file.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:size])
        self._source.num_bytes += size
        return size


class _Damaged(Exception):
    """The compressed data is wrong, or ends too early."""


class _Unzstd(io.RawIOBase):
    """What a zstd file holds, frame after frame.

    By hand, since the library's own reader takes a file that is cut short for a whole one.
    """

    def __init__(self, file: io.RawIOBase) -> None:
        """Raises DataError if the library is not installed."""
        super().__init__()
        try:
            import zstandard
        except ImportError:
            raise DataError("a .zst file needs `pip install zstandard`") from None
        self._error = zstandard.ZstdError
        unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._new_frame = unpacker.decompressobj
        self._frame: Any = None
        self._file = file
        self._compressed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._advance():
            pass
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _advance(self) -> bool:
        """Decompress one more block; False at the end of the file."""
        data = self._compressed or self._file.read(2**15) or b""
        self._compressed = b""
        if not data:
            if self._frame is not None:
                raise _Damaged("it ends in the middle of a zstd frame")
            return False
        self._frame = self._frame or self._new_frame()
        try:
            self._ready = self._frame.decompress(data)
        except self._error as error:
            raise _Damaged(str(error)) from None
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None
        return True
