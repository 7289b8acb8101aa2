"""A tokenizer keeps its identity through saving and padding, and is loaded without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_sft.data.tokenizer import (
    load_backend,
    load_tokenizer,
    own_template,
    save_tokenizer,
    token_bytes,
    tokenizer_hash,
)
from ds_sft.errors import DataError

TINY = Path(__file__).parents[1] / "golden" / "tiny_tokenizer"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "tokenizer"))


def edit(directory: Path, change) -> Path:
    path = directory / "tokenizer.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return directory


def test_saving_again_keeps_the_hash(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(TINY))
    save_tokenizer(tokenizer, "a template\n", tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "a template\n"
    assert (
        tokenizer_hash(TINY)
        == tokenizer_hash(TINY / "tokenizer.json")
        == tokenizer_hash(str(TINY))
        == tokenizer_hash(tokenizer)
        == tokenizer_hash(tmp_path / "again")
    )


def test_the_padding_of_an_export_keeps_the_hash() -> None:
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.add_tokens([f"<|padding_{i}|>" for i in range(5)])
    assert tokenizer_hash(tokenizer) == tokenizer_hash(TINY)
    tokenizer.add_tokens(["<|other|>"])
    assert tokenizer_hash(tokenizer) != tokenizer_hash(TINY)


def test_other_tokens_ids_or_merges_change_the_hash(copy: Path) -> None:
    hashes = {tokenizer_hash(TINY)}
    hashes.add(tokenizer_hash(edit(copy, lambda c: c["added_tokens"][0].update(content="<x>"))))
    hashes.add(tokenizer_hash(edit(copy, lambda c: c["added_tokens"][0].update(id=999))))
    hashes.add(tokenizer_hash(edit(copy, lambda c: c["model"].update(merges=[["a", "b"]]))))
    assert len(hashes) == 4
    assert tokenizer_hash(edit(copy, lambda c: c["model"].update(merges=["a b"]))) in hashes


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        tokenizer_hash(tmp_path)
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="is not a directory"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        tokenizer_hash(tmp_path)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_the_bytes_of_the_tokens_are_the_text() -> None:
    backend = load_backend(TINY / "tokenizer.json")
    table = token_bytes(backend)
    assert table is not None
    text = "".join(map(chr, range(0x20, 0x250))) + "\n\t中🙂<|im_end|>"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(table[number] for number in ids) == text.encode()
    assert sorted(table[:256]) == [bytes([byte]) for byte in range(256)]


def test_a_tokenizer_without_a_template_asks_for_one(copy: Path) -> None:
    assert "<|im_start|>" in own_template(load_tokenizer(str(copy)), "x")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template: add --chat-template"):
        own_template(load_tokenizer(str(copy)), "x")


def test_loading_and_preparing_do_not_import_torch() -> None:
    code = (
        "import sys; from ds_sft.data import prepare, inspect, tokenizer;"
        "assert 'transformers' not in sys.modules;"
        f"tokenizer.load_tokenizer({str(TINY)!r});"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
