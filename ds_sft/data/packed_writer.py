"""Writes a packed data set: pack by pack, in bounded memory, whole or not there.

Owns the way from packs to the files that `packed` describes and reads. Invariants: a writer holds
one pack in memory, whatever the size of the data; the directory takes its final name only when
every byte of it is on the disk; one writer at a time writes an `<out>`, held apart by a lock in
`<out>.partial`; nothing is deleted that a writer did not make.

A kill leaves `<out>.partial` at most, which the next writer empties, or, between the two renames
of a replacement, `<out>.replaced`, which the next writer brings back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ds_sft.data.claim import LOCK, PARTIAL_SUFFIX, claim, foreign
from ds_sft.data.packed import (
    ARRAY_DTYPES,
    FORMAT_VERSION,
    MANIFEST,
    REPLACED_SUFFIX,
    TOKENIZER_DIR,
    Array,
    file_sha256,
)
from ds_sft.data.sealed import sealed_json
from ds_sft.errors import DataError


class PackedWriter:
    """Writes a packed data set pack by pack; use as a context manager and end with `commit`.

        with PackedWriter(out, max_seq_len=32768) as writer:
            writer.add_pack(tokens, mask, doc_lens=[120, 87])
            writer.commit({"packing": "next-fit"})

    Leaving the block without a commit (an error, Ctrl-C) removes everything that was written.
    """

    def __init__(self, out: Path, max_seq_len: int, *, replace: bool = False) -> None:
        """`replace` lets `commit` take the place of an existing `out`; else that is a DataError."""
        self.out = out
        self.max_seq_len = max_seq_len
        self.replace = replace
        _refuse_existing(out, replace)
        self.partial = out.with_name(out.name + PARTIAL_SUFFIX)
        self.replaced = out.with_name(out.name + REPLACED_SUFFIX)
        self.num_docs = 0
        self._lock = -1
        self._files: dict[str, _GrowingArray] = {}

    @property
    def num_packs(self) -> int:
        return self._files["tokens"].rows

    @property
    def tokenizer_dir(self) -> Path:
        """Where the caller puts the tokenizer before `commit`."""
        return self.partial / TOKENIZER_DIR

    def __enter__(self) -> Self:
        self._lock = claim(self.partial, self.out)
        try:
            self._bring_back()
            self._start()
        except BaseException:
            self._abandon()
            raise
        return self

    def _bring_back(self) -> None:
        """Undo a replacement that a kill ended half-way."""
        self._check_replaced()
        if not self.out.exists() and (self.replaced / MANIFEST).is_file():
            self.replaced.rename(self.out)
            _refuse_existing(self.out, self.replace)

    def _check_replaced(self) -> None:
        """Raise DataError if the place for what is replaced is somebody else's."""
        reason = foreign(self.replaced) if os.path.lexists(self.replaced) else ""
        if reason:
            raise DataError(
                f"{self.replaced} is in the way and {reason}: move it away, or choose another --out"
            )

    def _start(self) -> None:
        for name, dtype in ARRAY_DTYPES.items():
            row = (self.max_seq_len,) if name in ("tokens", "assistant_mask") else ()
            self._files[name] = _GrowingArray(self.partial / f"{name}.npy", dtype, row)
        self._files["pack_offsets"].append(np.zeros(1, np.int64))

    def add_pack(self, tokens: Array, assistant_mask: Array, doc_lens: Sequence[int]) -> None:
        """Append one pack: its documents' tokens and mask, unpadded [sum(doc_lens)]."""
        used = len(tokens)
        assert used == len(assistant_mask) == sum(doc_lens) <= self.max_seq_len
        row = np.zeros(self.max_seq_len, np.int32)
        row[:used] = tokens
        mask = np.zeros(self.max_seq_len, np.uint8)
        mask[:used] = assistant_mask
        self.num_docs += len(doc_lens)
        self._files["tokens"].append(row[None])
        self._files["assistant_mask"].append(mask[None])
        self._files["doc_lens"].append(np.asarray(doc_lens, np.int32))
        self._files["pack_offsets"].append(np.array([self.num_docs], np.int64))
        self._files["assistant_counts"].append(np.array([mask[1:].sum()], np.int64))

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Flush everything, write the manifest last, and give the directory its name."""
        for file in self._files.values():
            file.close()
        for path in sorted(self.partial.rglob("*")):
            _fsync(path)
        facts = {
            "format_version": FORMAT_VERSION,
            "max_seq_len": self.max_seq_len,
            **manifest,
            "sha256": {name: file_sha256(self.partial / name) for name in self._written()},
        }
        marker = self.partial / MANIFEST
        marker.write_text(sealed_json(facts, indent=2, ensure_ascii=False), encoding="utf-8")
        _fsync(marker)
        _fsync(self.partial)
        _refuse_existing(self.out, self.replace)
        self._check_replaced()
        self._take_name()
        (self.out / LOCK).unlink()
        if self.replaced.exists():
            shutil.rmtree(self.replaced)

    def _take_name(self) -> None:
        """Rename the whole directory, and what it replaces out of the way."""
        if self.replaced.exists():
            shutil.rmtree(self.replaced)
        if self.out.exists():
            self.out.rename(self.replaced)
        try:
            self.partial.rename(self.out)
        except OSError:
            if self.replaced.exists():
                self.replaced.rename(self.out)
            raise
        # The name is another writer's from here on.
        os.close(self._lock)
        self._lock = -1
        _fsync(self.out.parent)

    def _written(self) -> list[str]:
        """Names of the arrays and of the tokenizer's files, relative to the data set."""
        stored = (path for path in self.tokenizer_dir.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(self.partial)) for path in stored)
        return [*(f"{name}.npy" for name in ARRAY_DTYPES), *names]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """Remove what was written, unless it was committed."""
        for file in self._files.values():
            file.abandon()
        if self._lock >= 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


class _GrowingArray:
    """A .npy file whose first axis grows; its header is written again at the end.

    numpy pads a header so that the first axis may take any number of digits: the header of 0 rows
    and that of the final number have the same length.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, row: tuple[int, ...]) -> None:
        self.rows = 0
        self._dtype = np.dtype(dtype)
        self._row = row
        self._file: BinaryIO = path.open("wb")
        self._write_header()
        self._data_start = self._file.tell()

    def _write_header(self) -> None:
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self.rows, *self._row),
            },
        )

    def append(self, rows: Array) -> None:
        assert rows.dtype == self._dtype
        assert rows.shape[1:] == self._row
        self._file.write(np.ascontiguousarray(rows).tobytes())
        self.rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._data_start
        self._file.close()

    def abandon(self) -> None:
        """Close without a word: on a full disk the flush of the last buffer fails again."""
        try:
            self._file.close()
        except OSError:
            return


def _refuse_existing(out: Path, replace: bool) -> None:
    """Only a data set, or an empty directory, is ever replaced."""
    if not out.name:
        raise DataError(f"--out {out} has no name of its own: name a new directory")
    if out.is_symlink():
        raise DataError(f"{out} is a link: name the directory itself")
    if not out.exists():
        return
    if not replace:
        raise DataError(f"{out} exists: choose another --out, or add --force to replace it")
    reason = foreign(out)
    if not reason and any(out.iterdir()) and not (out / MANIFEST).is_file():
        reason = f"has no {MANIFEST}"
    if reason:
        raise DataError(
            f"{out} {reason}, so --force does not delete it: name another --out, or delete it "
            "yourself"
        )


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
