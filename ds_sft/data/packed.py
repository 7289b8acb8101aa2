"""The packed data set on disk: how it is written and how it is opened.

A directory, described in full by its files:

    tokens.npy            int32 [num_packs, L]     padding is 0
    assistant_mask.npy    uint8 [num_packs, L]     1 = this token is trained
    doc_lens.npy          int32 [num_docs]         lengths in tokens, in pack order
    pack_offsets.npy      int64 [num_packs + 1]    pack i holds doc_lens[offsets[i]:offsets[i + 1]]
    assistant_counts.npy  int64 [num_packs]        trained targets of the pack, as the loss counts
    tokenizer/            the tokenizer, with the chat template as rendered
    manifest.json         written last: a directory without it is not a data set

Invariants. A writer holds one pack in memory, whatever the size of the data. The directory takes
its final name only when every byte of it is on the disk: a kill or a full disk leaves
`<out>.partial` at most, and the next writer removes that. A pack's trained targets are the trained
tokens after its first position, since nothing predicts position 0 of a row.

Left to others: what a document is (`chat`), which documents share a pack (`packing`), and how packs
become a batch (`collate`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ds_sft.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER_DIR = "tokenizer"
ARRAY_DTYPES: dict[str, npt.DTypeLike] = {
    "tokens": np.int32,
    "assistant_mask": np.uint8,
    "doc_lens": np.int32,
    "pack_offsets": np.int64,
    "assistant_counts": np.int64,
}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDataset:
    """A packed data set, memory-mapped: opening costs the same whatever its size."""

    path: Path
    """Directory of the data set."""
    manifest: dict[str, Any]
    """Contents of manifest.json; may hold only `max_seq_len` (written by the first trainer)."""
    manifest_sha256: str
    """Hash of the file manifest.json, by which a run recognises its data."""
    max_seq_len: int
    """Tokens in a pack, padding included (L)."""
    tokens: Array
    """Token ids, int32 [num_packs, L]."""
    assistant_mask: Array
    """1 where the token is trained, uint8 [num_packs, L]."""
    doc_lens: Array
    """Document lengths in tokens, int32 [num_docs]."""
    pack_offsets: Array
    """Where each pack's documents start in `doc_lens`, int64 [num_packs + 1]."""
    assistant_counts: Array
    """Trained targets per pack, int64 [num_packs]."""

    @property
    def num_packs(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def tokenizer_dir(self) -> Path | None:
        """The stored tokenizer; None for a data set of the first trainer, which stored none."""
        stored = self.path / TOKENIZER_DIR
        return stored if stored.is_dir() else None

    def doc_lengths(self, pack: int) -> list[int]:
        """Lengths in tokens of the documents of one pack, in order; padding is not among them."""
        first, last = int(self.pack_offsets[pack]), int(self.pack_offsets[pack + 1])
        return [int(length) for length in self.doc_lens[first:last]]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PackedDataset:
        """Map the arrays and check that they fit together. Raises DataError with what to do."""
        root = Path(path)
        manifest, digest = _read_manifest(root)
        max_seq_len = manifest.get("max_seq_len")
        if not isinstance(max_seq_len, int) or isinstance(max_seq_len, bool) or max_seq_len < 2:
            raise DataError(
                f"{root / MANIFEST}: max_seq_len is {max_seq_len!r}, which is not a length of at "
                "least 2 tokens: run `ds-sft prepare` again"
            )
        version = manifest.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise DataError(
                f"{root}: data format {version}, but this ds_sft reads format {FORMAT_VERSION}: "
                "run `ds-sft prepare` again with this version"
            )
        arrays = {name: _map_array(root, name) for name in ARRAY_DTYPES}
        _check_shapes(root, arrays, max_seq_len)
        return cls(
            path=root,
            manifest=manifest,
            manifest_sha256=digest,
            max_seq_len=max_seq_len,
            **arrays,
        )


def _read_manifest(root: Path) -> tuple[dict[str, Any], str]:
    if not root.is_dir():
        raise DataError(f"{root} is not a directory: make it with `ds-sft prepare --out {root}`")
    try:
        raw = (root / MANIFEST).read_bytes()
        manifest = json.loads(raw)
    except FileNotFoundError:
        raise DataError(
            f"{root} has no {MANIFEST}, so it is not a whole packed data set: "
            "run `ds-sft prepare` again"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{root / MANIFEST} cannot be read ({error}): run prepare again") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{root / MANIFEST} is not a JSON object: run `ds-sft prepare` again")
    return manifest, hashlib.sha256(raw).hexdigest()


def _map_array(root: Path, name: str) -> Array:
    path = root / f"{name}.npy"
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run `ds-sft prepare` again") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): run `ds-sft prepare` again") from None
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{path} holds {array.dtype}, not integers: run `ds-sft prepare` again")
    return array


def _check_shapes(root: Path, arrays: Mapping[str, Array], max_seq_len: int) -> None:
    """Refuse arrays that contradict each other; reads the small ones only, never the tokens."""
    num_packs = len(arrays["tokens"])
    expected: dict[str, tuple[int, ...]] = {
        "tokens": (num_packs, max_seq_len),
        "assistant_mask": (num_packs, max_seq_len),
        "pack_offsets": (num_packs + 1,),
        "assistant_counts": (num_packs,),
        "doc_lens": (arrays["doc_lens"].shape[0],),
    }
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise DataError(
                f"{root}/{name}.npy has shape {arrays[name].shape}, but {shape} is needed with "
                f"max_seq_len {max_seq_len}: run `ds-sft prepare` again"
            )
    offsets = np.asarray(arrays["pack_offsets"], dtype=np.int64)
    lengths = np.asarray(arrays["doc_lens"], dtype=np.int64)
    if offsets[0] != 0 or offsets[-1] != len(lengths) or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{root}/pack_offsets.npy does not run from 0 to the {len(lengths)} documents of "
            "doc_lens.npy: run `ds-sft prepare` again"
        )
    ends = np.concatenate([[0], np.cumsum(lengths)])
    used = ends[offsets[1:]] - ends[offsets[:-1]]
    if (lengths < 0).any() or (used > max_seq_len).any():
        raise DataError(
            f"{root}/doc_lens.npy puts {int(used.max())} tokens into a pack of {max_seq_len}: "
            "run `ds-sft prepare` again"
        )


def check_hashes(data: PackedDataset) -> list[str]:
    """Compare every array with the hash in the manifest; return the names checked.

    Reads the whole data set. An empty list means that the manifest holds no hashes (first trainer).
    Raises DataError naming the first file that differs.
    """
    hashes = data.manifest.get("sha256", {})
    for name, expected in hashes.items():
        if _file_sha256(data.path / name) != expected:
            raise DataError(
                f"{data.path / name} is not the file that prepare wrote (its sha256 differs from "
                "the manifest's): copy the data set again or run `ds-sft prepare` again"
            )
    return list(hashes)


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
        self.partial = out.with_name(out.name + ".partial")
        self.num_docs = 0
        self._files: dict[str, _GrowingArray] = {}
        _refuse_existing(out, replace)

    @property
    def num_packs(self) -> int:
        return self._files["tokens"].rows

    @property
    def tokenizer_dir(self) -> Path:
        """Where the caller puts the tokenizer before `commit`."""
        return self.partial / TOKENIZER_DIR

    def __enter__(self) -> Self:
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        for name, dtype in ARRAY_DTYPES.items():
            row = (self.max_seq_len,) if name in ("tokens", "assistant_mask") else ()
            self._files[name] = _GrowingArray(self.partial / f"{name}.npy", dtype, row)
        self._files["pack_offsets"].append(np.zeros(1, np.int64))
        return self

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
            "sha256": {
                f"{name}.npy": _file_sha256(self.partial / f"{name}.npy") for name in ARRAY_DTYPES
            },
        }
        marker = self.partial / MANIFEST
        marker.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _fsync(marker)
        _fsync(self.partial)
        _refuse_existing(self.out, self.replace)
        old = self.out.with_name(self.out.name + ".replaced")
        if self.out.exists():
            if old.exists():
                shutil.rmtree(old)
            self.out.rename(old)
        self.partial.rename(self.out)
        _fsync(self.out.parent)
        if old.exists():
            shutil.rmtree(old)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.abandon()
        shutil.rmtree(self.partial, ignore_errors=True)


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
    if out.exists() and not replace:
        raise DataError(f"{out} exists: choose another --out, or add --force to replace it")


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
