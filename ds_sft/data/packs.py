"""Documents as they come -> packs for the writer.

Owns the open pack: documents join it in the order of the input, and a full one goes to the writer.
Invariant: every document of a chunk is counted once, as packed, cut or dropped, and its rejected
and dropped rows with it.

Left to others: which document joins which pack (`packing`), the files (`packed_writer`), and what
the counts mean (`report`).
"""

from __future__ import annotations

import numpy as np

from ds_sft.data.packed import Array
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.packing import LEVANTER_MAX_DOCS, NextFit, overlong_message
from ds_sft.data.pipeline import Encoded
from ds_sft.data.report import Counts
from ds_sft.errors import DataError


class Packs:
    """The open pack: documents join it in order; a full one goes to the writer."""

    def __init__(
        self, writer: PackedWriter, counts: Counts, *, max_docs: int = LEVANTER_MAX_DOCS
    ) -> None:
        self._writer = writer
        self._counts = counts
        self._max_seq_len = writer.max_seq_len
        self._fit = NextFit(writer.max_seq_len, max_docs)
        self._tokens: list[Array] = []
        self._masks: list[Array] = []

    def add(self, encoded: Encoded, name: str) -> None:
        """Place the documents of one chunk of the source `name`; count all of its rows."""
        self._counts.add_rows(encoded, name)
        end = 0
        for place, full, kept in zip(
            encoded.places, encoded.full_lengths, encoded.kept_lengths, strict=True
        ):
            start, end = end, end + kept
            if kept > self._max_seq_len:
                raise DataError(overlong_message(f"{name}:{place}", full, self._max_seq_len))
            self._counts.accept(full, kept)
            if kept == 0:
                self._fit.end_pack()
                continue
            if self._fit.starts_new_pack(full):
                self.flush()
            self._tokens.append(encoded.tokens[start:end])
            self._masks.append(encoded.assistant_mask[start:end])

    def flush(self) -> None:
        """Write the open pack, if it holds a document."""
        if not self._tokens:
            return
        mask = np.concatenate(self._masks)
        lengths = [len(tokens) for tokens in self._tokens]
        self._writer.add_pack(np.concatenate(self._tokens), mask, lengths)
        self._counts.trained_tokens += int(mask.sum())
        self._counts.packs += 1
        self._tokens, self._masks = [], []
