"""Documents as they come -> packs for the writer.

Owns where documents wait until their pack is written. Next-fit holds one open pack. Best-fit knows
its packs only when it knows every length: it spools documents to unnamed files beside the data (5
bytes a token, gone with the process however it ends) and reads them back pack by pack. In memory
are one chunk, one pack and, for best-fit, a few dozen bytes a document.

Invariant: every document of a chunk is counted once, as packed, cut or dropped, and its rejected
and dropped rows with it. Without a writer everything is counted and nothing is written.

Left to others: which document joins which pack (`packing`), the files (`packed_writer`), and what
the counts mean (`report`).
"""

from __future__ import annotations

import os
import tempfile
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ds_sft.data.encoded import Encoded
from ds_sft.data.packed import Array
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.packing import LEVANTER_MAX_DOCS, NextFit, Packing, best_fit, overlong_message
from ds_sft.data.report import Counts
from ds_sft.errors import DataError


class Packs:
    """Takes chunks of documents in the order of the input; `flush` ends it."""

    def __init__(
        self,
        writer: PackedWriter | None,
        counts: Counts,
        *,
        packing: Packing = "next-fit",
        max_docs: int = LEVANTER_MAX_DOCS,
    ) -> None:
        """`max_docs` is next-fit's; best-fit has no cap. Without `writer` all is only counted."""
        self._counts = counts
        self._packing = packing
        self._max_docs = {"next-fit": max_docs, "best-fit": 0, "none": 1}[packing]
        self._closed = _ClosedPacks(writer, counts)
        self._waiting: _OpenPack | _Spool
        if packing == "best-fit":
            self._waiting = _Spool(self._closed, writer.partial if writer else None)
        else:
            self._waiting = _OpenPack(self._closed, NextFit(counts.max_seq_len, self._max_docs))

    def add(self, encoded: Encoded, name: str) -> None:
        """Place the documents of one chunk of the source `name`; count all of its rows.

        Raises DataError for a document that is too long and may not be cut.
        """
        self._counts.add_rows(encoded, name)
        for place, full, kept in zip(
            encoded.places, encoded.full_lengths, encoded.kept_lengths, strict=True
        ):
            if kept > self._counts.max_seq_len:
                what = f"{name}:{place}"
                raise DataError(overlong_message(what, full, self._counts.max_seq_len))
            self._counts.accept(full, kept)
        self._counts.trained_tokens += int(encoded.assistant_mask.sum())
        self._waiting.add(encoded)

    def flush(self) -> None:
        """Write every pack that is not yet written."""
        self._waiting.flush()

    def manifest(self) -> dict[str, Any]:
        """What the manifest says of the packing, after `flush`."""
        return {
            "kind": self._packing,
            "max_docs_per_pack": self._max_docs,
            "fill": round(self._counts.fill, 6),
            "document_lengths": self._closed.document_lengths.manifest(),
            "documents_per_pack": self._closed.documents_per_pack.manifest(),
        }


class Histogram:
    """How many values lie from 2^i to 2^(i+1) - 1; values of at least 1."""

    def __init__(self) -> None:
        self._counts: list[int] = []

    def add(self, value: int) -> None:
        place = value.bit_length() - 1
        self._counts += [0] * (place + 1 - len(self._counts))
        self._counts[place] += 1

    def manifest(self) -> dict[str, list[int]]:
        """Bin i counts the values from `bounds[i]` up to, without, `bounds[i + 1]`."""
        bounds = [2**place for place in range(len(self._counts) + 1)]
        return {"bounds": bounds, "counts": self._counts}


class _ClosedPacks:
    """Packs on their way to the writer, counted."""

    def __init__(self, writer: PackedWriter | None, counts: Counts) -> None:
        self._writer = writer
        self._counts = counts
        self.max_seq_len = counts.max_seq_len
        self.document_lengths = Histogram()
        self.documents_per_pack = Histogram()

    def add(self, lengths: list[int], tokens: list[Array], masks: list[Array]) -> None:
        """One pack, given per document; without a writer the arrays may be missing."""
        self._counts.packs += 1
        self.documents_per_pack.add(len(lengths))
        for length in lengths:
            self.document_lengths.add(length)
        if self._writer:
            self._writer.add_pack(np.concatenate(tokens), np.concatenate(masks), lengths)


class _OpenPack:
    """Next-fit: documents wait in memory until their pack is full."""

    def __init__(self, closed: _ClosedPacks, fit: NextFit) -> None:
        self._closed = closed
        self._fit = fit
        self._tokens: list[Array] = []
        self._masks: list[Array] = []

    def add(self, encoded: Encoded) -> None:
        end = 0
        for full, kept in zip(encoded.full_lengths, encoded.kept_lengths, strict=True):
            start, end = end, end + kept
            if kept == 0:
                self._fit.end_pack()
                continue
            if self._fit.starts_new_pack(full):
                self.flush()
            self._tokens.append(encoded.tokens[start:end])
            self._masks.append(encoded.assistant_mask[start:end])

    def flush(self) -> None:
        if self._tokens:
            lengths = [len(document) for document in self._tokens]
            self._closed.add(lengths, self._tokens, self._masks)
        self._tokens, self._masks = [], []


class _Spool:
    """Best-fit: documents wait on disk until every length is known."""

    def __init__(self, closed: _ClosedPacks, directory: Path | None) -> None:
        self._closed = closed
        self._lengths = array("i")
        self._tokens = _SpoolFile(directory, np.int32) if directory else None
        self._masks = _SpoolFile(directory, np.uint8) if directory else None

    def add(self, encoded: Encoded) -> None:
        self._lengths.extend(kept for kept in encoded.kept_lengths if kept > 0)
        if self._tokens and self._masks:
            self._tokens.append(encoded.tokens)
            self._masks.append(encoded.assistant_mask)

    def flush(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        for pack in best_fit(lengths, self._closed.max_seq_len):
            spans = list(zip(starts[pack].tolist(), lengths[pack].tolist(), strict=True))
            tokens = [self._tokens.read(*span) for span in spans] if self._tokens else []
            masks = [self._masks.read(*span) for span in spans] if self._masks else []
            self._closed.add(lengths[pack].tolist(), tokens, masks)
        for file in (self._tokens, self._masks):
            if file:
                file.close()


class _SpoolFile:
    """An array of one axis on disk, without a name: the system deletes it with the process.

    Read by position and not mapped: pages of a map would count as memory of the process.
    """

    def __init__(self, directory: Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (see close)

    def append(self, values: Array) -> None:
        assert values.dtype == self._dtype
        self._file.write(values.tobytes())

    def read(self, start: int, number: int) -> Array:
        """The `number` values from `start` on."""
        self._file.flush()
        size = self._dtype.itemsize
        raw = os.pread(self._file.fileno(), number * size, start * size)
        return np.frombuffer(raw, self._dtype)

    def close(self) -> None:
        self._file.close()
