"""What a worker sends back: the documents of one chunk of rows, flat, and what became of the rest.

Left to others: making it (`pipeline`), leaving rows out of it (`duplicates`), packing (`packs`),
counting (`report`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds_sft.data.records import Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Tokens of an accepted row that no pack takes."""

    place: int
    """Line or row number in its source."""
    num_tokens: int
    reason: str
    """A slug under which such tokens are counted."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Rows that became several samples, each of which holds what precedes its turns again."""

    rows: int = 0
    samples: int = 0
    """Samples of these rows."""
    tokens: int = 0
    """Tokens of these samples, beyond the longest of each row."""

    def __add__(self, other: Repeated) -> Repeated:
        return Repeated(
            self.rows + other.rows, self.samples + other.samples, self.tokens + other.tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """The documents of one chunk, in order, and the rows that are none.

    A row may be several documents, and a document cut into several pieces is as many documents.
    """

    source: int
    """Index of the file."""
    num_bytes: int
    """Size of the chunk in the file, for the progress bar."""
    num_accepted: int
    """Rows that were not rejected."""
    places: list[int]
    """Line or row number of each document."""
    full_lengths: list[int]
    """Tokens of each document before cutting; of a piece, the tokens of the piece."""
    kept_lengths: list[int]
    """Tokens of each document after cutting; 0 if it is dropped as overlong."""
    tokens: npt.NDArray[np.int32]
    """The kept tokens of all documents, end to end."""
    assistant_mask: npt.NDArray[np.uint8]
    """Their mask."""
    dropped: list[Dropped]
    """What is left out for a reason other than its length; has no place among the documents."""
    rejected: list[tuple[int, Rejected]]
    """Place and reason of each rejected row."""
    num_tokens: int = 0
    """Tokens of the accepted rows before anything was cut or dropped."""
    hashes: list[tuple[int, bytes]] = field(default_factory=list)
    """Place of each accepted row, and 16 bytes that tell rows apart: of its tokens and mask."""
    shapes: dict[str, int] = field(default_factory=dict)
    """Rows by the shape that they were read as."""
    repeated: Repeated = Repeated()
    """What rows of several samples add to the data."""
