"""`ds-sft inspect` shows what a pack holds and what of it is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ds_sft.data import inspect
from ds_sft.data.inspect import InspectFlags
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.tokenizer import load_backend
from ds_sft.errors import ConfigError, DataError

TINY = Path(__file__).parents[1] / "golden" / "tiny_tokenizer"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    backend = load_backend(TINY / "tokenizer.json")
    out = tmp_path / "data"
    with PackedWriter(out, max_seq_len=40) as writer:
        shutil.copytree(TINY, writer.tokenizer_dir)
        ids = backend.encode("ask: [x]<|im_end|>\nyes é<|im_end|>\n", add_special_tokens=False).ids
        mask = np.zeros(len(ids), np.uint8)
        mask[10:] = 1
        writer.add_pack(np.array(ids * 2), np.concatenate([mask, mask * 0]), [len(ids)] * 2)
        writer.commit({})
    return out


def test_trained_text_stands_in_brackets(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect.run(InspectFlags(data=data))
    said = capsys.readouterr().out
    assert "ask: [x]<|im_end|>\n[yes é<|im_end|>\n]" in said
    assert "document 1 of 2: 18 tokens, 8 trained (44%)" in said
    assert "document 2 of 2: 18 tokens, 0 trained (0%)" in said
    assert "pack 0 of 1" in said
    assert "36 of 40 tokens used (90.0%), 8 trained targets" in said
    assert said.rstrip().endswith("4 tokens")


def test_ids_need_no_tokenizer(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(data / "tokenizer")
    with pytest.raises(DataError, match="holds no tokenizer to show text with: add --ids"):
        inspect.run(InspectFlags(data=data))
    inspect.run(InspectFlags(data=data, ids=True))
    assert "256 198 [" in capsys.readouterr().out


@pytest.mark.parametrize("pack", [-1, 1, 99])
def test_a_pack_that_is_not_there_is_refused(data: Path, pack: int) -> None:
    with pytest.raises(ConfigError, match=f"--pack {pack}: .* has packs 0 to 0"):
        inspect.run(InspectFlags(data=data, pack=pack))
