"""Rows that were seen before.

Owns the memory of rows, 24 bytes in a table at most two thirds full, and the dropping of those that
come again. Two rows are the same if their tokens and masks are; a repeat of a source (`PATH:3`) is
no duplicate of itself. The validation part comes first, and its rows that are trained all the same
are counted.

Left to others: the hashes (`pipeline`), the counts (`report`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_sft.data.encoded import Dropped, Encoded

_HASH, _OWNER = 16, 8
_ENTRY = _HASH + _OWNER
_PLACE_BITS = 40
_TRAINED = 1 << 63
"""Set in the owner of a row of the training part."""
_EMPTY = bytes(_HASH)


class Duplicates:
    """Asked about every chunk, in order."""

    def __init__(self, *, drop: bool) -> None:
        self._drop = drop
        self._owners = HashTable()
        self._trained_too: set[int] = set()

    @property
    def num_leaked(self) -> int:
        """Rows of the validation part that are trained too, each counted once."""
        return len(self._trained_too)

    def sift(self, encoded: Encoded, file: int, *, validation: bool = False) -> tuple[Encoded, int]:
        """The chunk, without its duplicates if they are dropped, and how many it has."""
        owner = file << _PLACE_BITS | (0 if validation else _TRAINED)
        firsts = {
            place: self._owners.first(digest, owner | place) for place, digest in encoded.hashes
        }
        again = {place for place, first in firsts.items() if first != owner | place}
        if not self._drop and not validation:
            self._trained_too |= {firsts[place] for place in again if firsts[place] < _TRAINED}
        if not again or not self._drop:
            return encoded, len(again)
        return _without(encoded, again), len(again)


def _without(encoded: Encoded, again: set[int]) -> Encoded:
    """Move the documents of some rows to what is dropped."""
    keep = np.array([place not in again for place in encoded.places], np.bool_)
    of_token = np.repeat(keep, encoded.kept_lengths)
    gone = [
        Dropped(place=place, num_tokens=full, reason="duplicate")
        for place, full, kept in zip(encoded.places, encoded.full_lengths, keep, strict=True)
        if not kept
    ]
    kept_places = np.flatnonzero(keep).tolist()
    return replace(
        encoded,
        places=[encoded.places[number] for number in kept_places],
        full_lengths=[encoded.full_lengths[number] for number in kept_places],
        kept_lengths=[encoded.kept_lengths[number] for number in kept_places],
        tokens=encoded.tokens[of_token],
        assistant_mask=encoded.assistant_mask[of_token],
        dropped=[*encoded.dropped, *gone],
    )


class HashTable:
    """Hashes of 16 bytes and a number for each, flat: a dict would take six times as much."""

    def __init__(self, slots: int = 1024) -> None:
        """`slots` is a power of two."""
        self._slots = slots
        self._used = 0
        self._table = bytearray(_ENTRY * slots)

    def first(self, digest: bytes, number: int) -> int:
        """The number with which this hash came first: the given one if it is new."""
        start = self._find(digest)
        found = bytes(self._table[start + _HASH : start + _ENTRY])
        if self._table[start : start + _HASH] != _EMPTY:
            return int.from_bytes(found, "little")
        self._table[start : start + _ENTRY] = digest + number.to_bytes(_OWNER, "little")
        self._used += 1
        if 3 * self._used > 2 * self._slots:
            self._grow()
        return number

    def _find(self, digest: bytes) -> int:
        """Where the hash is, or would be."""
        slot = int.from_bytes(digest[:8], "little") & (self._slots - 1)
        while True:
            start = slot * _ENTRY
            found = self._table[start : start + _HASH]
            if found in (digest, _EMPTY):
                return start
            slot = (slot + 1) & (self._slots - 1)

    def _grow(self) -> None:
        old = self._table
        self._slots *= 2
        self._table = bytearray(_ENTRY * self._slots)
        for start in range(0, len(old), _ENTRY):
            entry = old[start : start + _ENTRY]
            if entry[:_HASH] != _EMPTY:
                place = self._find(bytes(entry[:_HASH]))
                self._table[place : place + _ENTRY] = entry
