"""Which documents share a pack: Levanter's next-fit.

Documents stay in order and in contiguous ranges; nothing is reordered, split or looked ahead at
(stanford-crfm/levanter, data/packing.py `pack_documents`, September 2025). A document joins the
open pack while the lengths fit and the pack holds fewer than `max_docs` documents; otherwise it
opens the next one. A document without tokens fits by length anywhere, and takes a place.

An overlong document (longer than a pack) is
- `raise`: an error of the caller, who knows its file and line;
- `left`: cut to its first L tokens, `right`: to its last L tokens; alone in its pack either way,
  without even a document of no tokens beside it;
- `drop`: left out, and it ends the open pack, as in the later Levanter;
- `split`: cut into pieces of L tokens, the last one shorter; each is a document of its own, which
  does not see the ones before it.

Left to others: the tokens themselves (`prepare` cuts and writes them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from ds_sft.errors import DataError

Overlong = Literal["raise", "left", "right", "drop", "split"]
LEVANTER_MAX_DOCS = 64


class NextFit:
    """The state of the open pack: asked once for every document, in order."""

    def __init__(self, max_seq_len: int, max_docs: int = LEVANTER_MAX_DOCS) -> None:
        assert max_seq_len >= 1
        assert max_docs >= 1
        self._max_seq_len = max_seq_len
        self._max_docs = max_docs
        self._tokens = 0
        self._docs = 0
        self._closed = False

    def starts_new_pack(self, length: int) -> bool:
        """Place a document of `length` uncut tokens; True if it closes the pack before it."""
        fits = self._tokens + length <= self._max_seq_len and self._docs < self._max_docs
        fresh = self._docs > 0 and (self._closed or not fits)
        if fresh:
            self._tokens = self._docs = 0
            self._closed = False
        self._tokens += min(length, self._max_seq_len)
        self._docs += 1
        if length > self._max_seq_len:
            self._closed = True
        return fresh

    def end_pack(self) -> None:
        """Let the next document open a pack; what a dropped document does."""
        self._closed = self._docs > 0


def cut(length: int, max_seq_len: int, overlong: Overlong) -> slice:
    """The tokens of a document that a pack takes, as a slice; empty for a dropped document."""
    if length <= max_seq_len:
        return slice(0, length)
    if overlong == "left":
        return slice(0, max_seq_len)
    if overlong == "right":
        return slice(length - max_seq_len, length)
    return slice(0, 0)


def pieces(length: int, max_seq_len: int, overlong: Overlong) -> list[slice]:
    """The tokens of a document that are packed, as one slice per document that comes of it.

    Empty for a dropped document; an overlong one under `raise` stays whole for the caller to refuse.
    """
    if length <= max_seq_len or overlong == "raise":
        return [slice(0, length)]
    if overlong == "left":
        return [slice(0, max_seq_len)]
    if overlong == "right":
        return [slice(length - max_seq_len, length)]
    if overlong == "drop":
        return []
    starts = range(0, length, max_seq_len)
    return [slice(start, min(start + max_seq_len, length)) for start in starts]


def pack_documents(
    lengths: Sequence[int],
    max_seq_len: int,
    *,
    max_docs: int = LEVANTER_MAX_DOCS,
    overlong: Overlong = "left",
) -> Iterator[list[int]]:
    """Document indices of each pack. Raises DataError for an overlong document under `raise`."""
    fit = NextFit(max_seq_len, max_docs)
    pack: list[int] = []
    for index, length in enumerate(lengths):
        if length > max_seq_len and overlong == "raise":
            raise DataError(overlong_message(f"document {index}", length, max_seq_len))
        if length > max_seq_len and overlong == "drop":
            fit.end_pack()
            continue
        if fit.starts_new_pack(length):
            yield pack
            pack = []
        pack.append(index)
    if pack:
        yield pack


def overlong_message(what: str, length: int, max_seq_len: int) -> str:
    """The one line for a document that is too long and may not be cut."""
    return (
        f"{what} has {length} tokens, more than max_seq_len {max_seq_len}: raise --max-seq-len, or "
        "choose --overlong left (keep its first tokens), right (its last), split or drop"
    )
