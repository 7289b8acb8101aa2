"""A file that is one JSON array -> the bytes of its elements, one at a time.

Owns the splitting, which looks at quotes and brackets only: an element that is no JSON is an
element all the same, so that one bad row costs no other. Invariants: memory stays at one element of
at most the limit and one block; an array that does not end is an error, never a shorter array.

Left to others: what is in an element (`rows`), opening the file (`sources`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 2**18

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)


class BrokenArray(Exception):
    """The file is no whole array: what is wrong, after which row."""


def elements(file: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """The elements of the array that `file` holds; None for one of more than `limit` bytes.

    Raises BrokenArray if the array does not end, or something follows it.
    """
    splitter = _Splitter(limit)
    while not splitter.ended:
        block = file.read(max(BLOCK_BYTES, splitter.num_waiting))
        if not block:
            raise BrokenArray("the array does not end")
        yield from splitter.split(block)
    rest = splitter.rest
    while not rest.strip():
        rest = file.read(BLOCK_BYTES)
        if not rest:
            return
    raise BrokenArray(f"{rest.strip()[:20]!r} follows the array")


class _Splitter:
    """Where in the array we are: takes blocks as they come, gives elements as they end."""

    def __init__(self, limit: int) -> None:
        self.ended = False
        self.rest = b""
        self._limit = limit
        self._depth = 0
        self._data = b""
        self._scanned = 0
        self._element_start = 0
        self._too_long = False

    @property
    def num_waiting(self) -> int:
        """Bytes of the element that is not yet whole."""
        return len(self._data)

    def split(self, block: bytes) -> Iterator[bytes | None]:
        self._data += block
        while not self.ended:
            token = _TOKEN.search(self._data, self._scanned)
            if token is None:
                self._scanned = len(self._data)
                break
            if token[0] == b'"':  # a string that goes on in the next block
                self._scanned = token.start()
                break
            self._scanned = token.end()
            yield from self._take(token)
        self._forget()

    def _take(self, token: re.Match[bytes]) -> Iterator[bytes | None]:
        sign = token[0]
        if sign in (b"[", b"{"):
            self._depth += 1
            if self._depth == 1:
                self._element_start = token.end()
        elif sign in (b"]", b"}"):
            self._depth -= 1
        ends = self._depth == 0 or (sign == b"," and self._depth == 1)
        if not ends:
            return
        element = self._data[self._element_start : token.start()].strip()
        too_long = self._too_long or len(element) > self._limit
        self.ended = self._depth == 0
        if too_long:
            yield None
        elif element or not self.ended:  # nothing before the closing bracket is no element
            yield element
        self._element_start, self._too_long = token.end(), False
        if self.ended:
            self.rest = self._data[token.end() :]

    def _forget(self) -> None:
        """Drop what was given out, and the inside of an element that is over the limit."""
        if self._element_start:
            self._data = self._data[self._element_start :]
            self._scanned -= self._element_start
            self._element_start = 0
        if len(self._data) <= self._limit + BLOCK_BYTES or self.ended:
            return
        self._too_long = True
        rest = self._data[self._scanned :]
        if rest.startswith(b'"'):  # stay inside the string, and keep a backslash at its end
            rest = b'"' + rest[len(rest.rstrip(b"\\")) :]
        self._data, self._scanned = rest, 0
