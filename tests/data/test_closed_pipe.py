"""A reader that goes away ends what only shows, and never what writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from preparing import TINY, chat, prepared, write

from ds_sft.data.packed import PackedDataset


def piped_to_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a stdout that is closed at its other end."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "ds_sft", *words]
    with os.fdopen(writes, "wb") as stdout:
        return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", [chat(str(number), "b") for number in range(20)])


def test_prepare_writes_its_data_without_a_reader(tmp_path: Path, chats: Path) -> None:
    how = ["--tokenizer", str(TINY), "--max-seq-len", "64", "--validation-fraction", "0.2"]
    out = tmp_path / "data"
    done = piped_to_nobody("prepare", "--input", str(chats), *how, "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert PackedDataset.open(out).manifest["counts"]["rows"] == 16


def test_inspect_without_a_reader_is_no_failure(tmp_path: Path, chats: Path) -> None:
    prepared(tmp_path / "data", chats)
    done = piped_to_nobody("inspect", str(tmp_path / "data"))
    assert (done.returncode, done.stderr) == (0, "")
