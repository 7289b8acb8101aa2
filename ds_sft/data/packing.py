"""Which documents share a pack: Levanter's next-fit, or best-fit decreasing.

`next-fit`: documents stay in order and in contiguous ranges; nothing is reordered, split or looked
ahead at (stanford-crfm/levanter, data/packing.py `pack_documents`, September 2025). A document
joins the open pack while the lengths fit and the pack holds fewer than `max_docs` documents;
otherwise it opens the next one. A document without tokens fits by length anywhere, and takes a
place. `none` is next-fit with one document a pack.

`best-fit`: the longest document first, each into the fullest pack that still has room for it. All
lengths must be known before the first pack is. Packs stand in the order of their first documents
and hold their documents in the order of the input, so that the data keep roughly their order.

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
from math import isqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ds_sft.errors import DataError

Overlong = Literal["raise", "left", "right", "drop", "split"]
Packing = Literal["next-fit", "best-fit", "none"]
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


def pieces(length: int, max_seq_len: int, overlong: Overlong) -> list[slice]:
    """The tokens of a document that are packed, as one slice per document that comes of it.

    Empty for a dropped document; under `raise` an overlong one stays whole: the caller refuses it.
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
    """Document indices of each pack; under `split`, of pieces that are documents already.

    Raises DataError for an overlong document under `raise`.
    """
    assert overlong != "split" or max(lengths, default=0) <= max_seq_len
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


def best_fit(
    lengths: npt.NDArray[np.integer[Any]], max_seq_len: int
) -> list[npt.NDArray[np.int64]]:
    """Document indices of each pack, ascending, by best-fit decreasing; lengths from 1 to L.

    Among equally long documents the first comes first; among equally full packs the one opened
    first. Best fit puts a document where the one of the same length before it went, as long as it
    has room, so that all documents of a length are placed at once (10 times faster, same packs).
    """
    if len(lengths) == 0:
        return []
    assert 1 <= lengths.min() <= lengths.max() <= max_seq_len
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    packs: list[int] = []  # where the documents of `by_length` go: packs[i] takes the next takes[i]
    takes: list[int] = []
    open_packs = _OpenPacks(max_seq_len)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count > 0:
            room, members = open_packs.pop_fullest(length, count)
            each = room // length
            taken = [each] * len(members)
            taken[-1] = min(each, count - each * (len(members) - 1))
            packs += members
            takes += taken
            count -= sum(taken)
            open_packs.put(room - taken[-1] * length, members[-1:])
            open_packs.put(room - each * length, members[:-1])
    pack_of = np.empty(len(lengths), np.int64)
    pack_of[by_length] = np.repeat(packs, takes)
    return _group(pack_of)


class _OpenPacks:
    """Packs by the room that they have left, in tokens; an unopened pack has room for L."""

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self._opened = 0
        self._packs: dict[int, list[int]] = {}
        # The rooms that occur, as bits: of a block of rooms, and of the blocks that have one.
        self._width = isqrt(max_seq_len) + 1
        self._rooms = [0] * self._width
        self._blocks = 0

    def pop_fullest(self, length: int, count: int) -> tuple[int, list[int]]:
        """The packs that `count` documents of `length` go into first, and the room each has."""
        room = self._least_room(length)
        if room is None:
            wanted = -(-count // (self._max_seq_len // length))
            self._opened += wanted
            return self._max_seq_len, list(range(self._opened - wanted, self._opened))
        members = sorted(self._packs.pop(room))
        block, bit = divmod(room, self._width)
        self._rooms[block] ^= 1 << bit
        if not self._rooms[block]:
            self._blocks ^= 1 << block
        wanted = -(-count // (room // length))
        self.put(room, members[wanted:])
        return room, members[:wanted]

    def put(self, room: int, members: list[int]) -> None:
        if room == 0 or not members:
            return
        self._packs.setdefault(room, []).extend(members)
        block, bit = divmod(room, self._width)
        self._rooms[block] |= 1 << bit
        self._blocks |= 1 << block

    def _least_room(self, length: int) -> int | None:
        """The smallest room of at least `length` that an open pack has."""
        block, bit = divmod(length, self._width)
        rooms = self._rooms[block] >> bit << bit
        if not rooms:
            blocks = self._blocks >> (block + 1) << (block + 1)
            if not blocks:
                return None
            block = _lowest_bit(blocks)
            rooms = self._rooms[block]
        return block * self._width + _lowest_bit(rooms)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _group(pack_of: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """The documents of each pack, packs in the order of their first documents."""
    _, first, pack = np.unique(pack_of, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[pack]
    documents = np.argsort(rank, kind="stable")
    return np.split(documents, np.cumsum(np.bincount(rank))[:-1])


def overlong_message(what: str, length: int, max_seq_len: int) -> str:
    """The one line for a document that is too long and may not be cut."""
    return (
        f"{what} has {length} tokens, more than max_seq_len {max_seq_len}: raise --max-seq-len, or "
        "choose --overlong left (keep its first tokens), right (its last), split or drop"
    )
