"""What the tests of `prepare` share: chats, the command with small defaults, decoded documents."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from ds_sft.data import prepare
from ds_sft.data.packed import PackedDataset
from ds_sft.data.prepare_flags import PrepareFlags
from ds_sft.data.tokenizer import load_backend

TINY = Path(__file__).parents[1] / "golden" / "tiny_tokenizer"


def chat(ask: str, reply: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": reply}]}


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def prepared(out: Path, *inputs: Any, **changes: Any) -> PackedDataset:
    """Run the command on inputs that are there already."""
    given: dict[str, Any] = {"input": inputs, "tokenizer": str(TINY), "max_seq_len": 64}
    prepare.run(PrepareFlags(**{**given, "out": out, "workers": 1, **changes}))
    return PackedDataset.open(out)


def run(tmp_path: Path, rows: list[Any], **changes: Any) -> PackedDataset:
    """Run the command on JSON lines that are written first."""
    path = write(tmp_path / "chats.jsonl", rows)
    changes = {"input": (path,), **changes}
    given: dict[str, Any] = {"tokenizer": str(TINY), "max_seq_len": 64, "workers": 1}
    out = changes.pop("out", tmp_path / "data")
    prepare.run(PrepareFlags(**{**given, "out": out, **changes}))
    return PackedDataset.open(tmp_path / "data")


def texts(data: PackedDataset) -> list[str]:
    """The documents in pack order, decoded, with what is trained in brackets."""
    backend = load_backend(TINY / "tokenizer.json")
    found = []
    for pack in range(data.num_packs):
        end = 0
        for length in data.doc_lengths(pack):
            start, end = end, end + length
            mask = data.assistant_mask[pack, start:end]
            edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), length]
            pieces = [
                (backend.decode(data.tokens[pack, start + a : start + b].tolist(), False), mask[a])
                for a, b in itertools.pairwise(edges)
            ]
            found.append("".join(f"[{text}]" if trained else text for text, trained in pieces))
    return found


def asks(data: PackedDataset) -> list[str]:
    """The user's words of each document."""
    return [text.split("user\n")[1].split("<|im_end|>")[0] for text in texts(data)]
