"""What a run was made from, as hashes: data files, tokenizer, template, base checkpoint.

Owns that part of run.json. Invariants: what is said was read from the files, or it is said where it
was read instead (the manifest of the data, whose own hash is checked against the arrays at the
start); a file is hashed once, not again at each restart, unless its size or time changed. Leaves
versions of code and packages to `changes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ds_sft.data.model_files import ModelFiles
from ds_sft.data.packed import VALIDATION_DIR, PackedDataset
from ds_sft.data.weight_files import INDEX_NAME, weight_files
from ds_sft.run import seal

LARGEST_HASHED = 100_000_000_000
"""Bytes of a checkpoint that is hashed whole: 31B parameters in bfloat16, minutes of reading."""
_SMALL_FILES = (
    "config.json", "generation_config.json", INDEX_NAME, "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
_THREADS = 8
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def record(
    data: PackedDataset,
    model: ModelFiles,
    tokenizer_dir: Path,
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """Hashes of everything a run is made from; `before` is what the last start recorded."""
    part = data.path / VALIDATION_DIR
    return {
        "data": _of_data(data),
        "validation": _of_data(PackedDataset.open(part)) if part.exists() else None,
        "tokenizer": _of_tokenizer(tokenizer_dir),
        "base_checkpoint": base_checkpoint(model, before.get("base_checkpoint")),
    }


def _of_data(data: PackedDataset) -> dict[str, Any]:
    """What the manifest says of the data's files; the hashes of the files where it says nothing."""
    arrays = data.manifest.get("sha256")
    if not arrays:
        arrays = hashes(data.path, sorted(p.name for p in data.path.glob("*.npy")))
    return {
        "path": str(data.path),
        "manifest_sha256": data.manifest_sha256,
        "files_sha256": arrays,
        "sources": data.manifest.get("sources"),
        "tokenizer_hash": data.manifest.get("tokenizer_hash"),
        "chat_template_sha256": data.manifest.get("chat_template_sha256"),
    }


def _of_tokenizer(directory: Path) -> dict[str, Any]:
    names = sorted(p.name for p in directory.iterdir() if p.is_file() and _is_of_tokenizer(p.name))
    template = next((n for n in _TEMPLATES if n in names), None)
    found = hashes(directory, names)
    return {
        "path": str(directory),
        "files_sha256": found,
        "chat_template_sha256": found.get(template) if template else None,
    }


def _is_of_tokenizer(name: str) -> bool:
    words = ("token", "vocab", "merges", "spiece", "chat_template", "special")
    return any(word in name for word in words) and not name.endswith(".safetensors")


def base_checkpoint(
    model: ModelFiles, before: Any = None, largest: int = LARGEST_HASHED
) -> dict[str, Any]:
    """Hashes of the model's files, or of all but the weights where those are too large.

    What `before` recorded of unchanged files is taken over: a restart need not read them again.
    """
    weights = weight_files(model.directory)
    small = [model.directory / name for name in _SMALL_FILES]
    files = [*weights, *(path for path in small if path.is_file())]
    stats = {path.name: _stat(path) for path in files}
    whole = sum(path.stat().st_size for path in weights) <= largest
    said = {
        "path": str(model.directory),
        "how": "sha256 of every file" if whole else "sha256 of the small files, sizes of all",
        "files": stats,
    }
    if isinstance(before, dict) and {k: before.get(k) for k in said} == said:
        return before
    hashed = [path.name for path in files if whole or path not in weights]
    return {**said, "files_sha256": hashes(model.directory, hashed)}


def _stat(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def hashes(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of files, several at a time: hashing releases the interpreter's lock."""
    names = list(names)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda n: seal.sha256(directory / n), names), strict=True))
