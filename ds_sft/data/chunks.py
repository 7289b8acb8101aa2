"""Rows that are taken -> chunks for the workers.

Owns the size of a chunk. Invariants: rows stay in the order of the input, a chunk holds rows of one
source, and the same input gives the same chunks.

Left to others: reading (`sources`, `tables`), which rows are taken (`draws`), the workers
(`pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ds_sft.data import tables
from ds_sft.data.draws import Take
from ds_sft.data.rows import Raw
from ds_sft.data.sources import TextSource

CHUNK_ROWS = 256
CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one source."""

    source: int
    places: list[int]
    """Line or row number of each row."""
    rows: list[bytes | None] | bytes
    """JSON, row by row; or all rows of a table's batch as Arrow's bytes."""
    num_bytes: int

    def raw_rows(self) -> Sequence[Raw]:
        return tables.to_rows(self.rows) if isinstance(self.rows, bytes) else self.rows


def chunks(takes: Sequence[Take]) -> Iterator[Chunk]:
    """Every row taken, in order. Raises DataError for a source that cannot be read."""
    for number, take in enumerate(takes):
        if isinstance(take.source, TextSource):
            yield from _text_chunks(number, take.source, take)
        else:
            yield from _table_chunks(number, take.source, take)


def _text_chunks(number: int, source: TextSource, take: Take) -> Iterator[Chunk]:
    places: list[int] = []
    rows: list[bytes | None] = []
    done = size = ordinal = 0
    for ordinal, (place, row) in enumerate(source, 1):
        if take.keep is not None and not take.takes(ordinal - 1):
            continue
        places.append(place)
        rows.append(row)
        size += len(row or b"")
        if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(number, places, rows, source.num_bytes - done)
            places, rows, size, done = [], [], 0, source.num_bytes
    take.check_end(ordinal)
    if rows:
        yield Chunk(number, places, rows, source.num_bytes - done)


def _table_chunks(number: int, source: tables.TableSource, take: Take) -> Iterator[Chunk]:
    start = 0
    for batch in source.batches():
        places = np.arange(start, start + batch.num_rows)
        start += batch.num_rows
        size = source.size * batch.num_rows // max(1, source.num_lines)
        if take.keep is not None:
            chosen = np.array([take.takes(place) for place in places.tolist()], np.bool_)
            batch, places = tables.some(batch, chosen), places[chosen]
        if len(places):
            yield Chunk(number, (places + 1).tolist(), tables.to_bytes(batch), size)
    take.check_end(start)
