"""The packed data set on disk: its files, and how it is opened.

A directory, described in full by its files:

    tokens.npy            int32 [num_packs, L]     padding is 0
    assistant_mask.npy    uint8 [num_packs, L]     1 = this token is trained
    doc_lens.npy          int32 [num_docs]         lengths in tokens, in pack order
    pack_offsets.npy      int64 [num_packs + 1]    pack i holds doc_lens[offsets[i]:offsets[i + 1]]
    assistant_counts.npy  int64 [num_packs]        trained targets of the pack, as the loss counts
    tokenizer/            the tokenizer, with the chat template as rendered
    manifest.json         written last: a directory without it is not a data set

A pack's trained targets are the trained tokens after its first position, since nothing predicts
position 0 of a row.

Left to others: writing it (`packed_writer`), what a document is (`chat`), which documents share a
pack (`packing`), and how packs become a batch (`collate`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_sft.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER_DIR = "tokenizer"
VALIDATION_DIR = "validation"
"""Where a data set holds its validation part, a data set of its own."""
REPLACED_SUFFIX = ".replaced"
"""Beside a data set: what `prepare --force` is about to replace with it."""
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
        old = root.with_name(root.name + REPLACED_SUFFIX)
        if old.is_dir():
            raise DataError(
                f"{root} is not there, but {old} is: a `prepare --force` was killed as it replaced "
                f"the data set; rename that to {root.name}, or run `ds-sft prepare` again"
            )
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
    if (lengths < 0).any():
        raise DataError(
            f"{root}/doc_lens.npy holds a document of {int(lengths.min())} tokens: "
            "run `ds-sft prepare` again"
        )
    ends = np.concatenate([[0], np.cumsum(lengths)])
    used = ends[offsets[1:]] - ends[offsets[:-1]]
    if (used > max_seq_len).any():
        raise DataError(
            f"{root}/doc_lens.npy puts {int(used.max())} tokens into a pack of {max_seq_len}: "
            "run `ds-sft prepare` again"
        )


def check_hashes(data: PackedDataset, share: int = 0, of: int = 1) -> list[str]:
    """Compare every file with its hash in the manifest; return the names checked.

    Reads the whole data set, or the `share`-th of `of` parts of its files. An empty list means that
    the manifest holds no hashes (first trainer). Raises DataError naming the first file that
    differs.
    """
    hashes = dict(list(data.manifest.get("sha256", {}).items())[share::of])
    for name, expected in hashes.items():
        if file_sha256(data.path / name) != expected:
            raise DataError(
                f"{data.path / name} is not the file that prepare wrote (its sha256 differs from "
                "the manifest's): copy the data set again or run `ds-sft prepare` again"
            )
    return list(hashes)


def check_pack(data: PackedDataset, pack: int) -> None:
    """Check one row against its document lengths and its count of trained targets.

    Raises DataError.
    """
    tokens, mask = data.tokens[pack], data.assistant_mask[pack]
    used = sum(data.doc_lengths(pack))
    if tokens.min() < 0:
        raise DataError(f"{data.path}: pack {pack} holds a negative token id")
    if mask.min() < 0 or mask.max() > 1:
        raise DataError(f"{data.path}: the mask of pack {pack} holds values other than 0 and 1")
    if tokens[used:].any() or mask[used:].any():
        raise DataError(f"{data.path}: pack {pack} has tokens after its {used} tokens of documents")
    trained = int(np.count_nonzero(mask[1:]))
    if trained != data.assistant_counts[pack]:
        raise DataError(
            f"{data.path}: pack {pack} has {trained} trained targets, assistant_counts.npy says "
            f"{int(data.assistant_counts[pack])}"
        )


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
