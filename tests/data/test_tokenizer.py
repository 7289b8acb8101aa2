"""A tokenizer keeps its identity through saving and padding, and is loaded without torch."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_sft.data.tokenizer import (
    borrowed_template,
    load_backend,
    load_tokenizer,
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
    assert "<|im_start|>" in borrowed_template(load_tokenizer(str(copy)), str(copy)).template
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"has no chat template, .* add --chat-template"):
        borrowed_template(load_tokenizer(str(copy)), str(copy))


def base_and_sibling(tmp_path: Path, suffix: str) -> Path:
    base = Path(shutil.copytree(TINY, tmp_path / "model"))
    (base / "chat_template.jinja").unlink()
    shutil.copytree(TINY, tmp_path / f"model{suffix}")
    return base


@pytest.mark.parametrize("suffix", ["-it", "-Instruct"])
def test_a_base_tokenizer_borrows_the_template_of_its_tuned_sibling(
    tmp_path: Path, suffix: str
) -> None:
    base = base_and_sibling(tmp_path, suffix)
    borrowed = borrowed_template(load_tokenizer(str(base)), str(base))
    assert borrowed.template == load_tokenizer(str(TINY)).chat_template
    assert borrowed.reason == f"chat template: that of {base}{suffix} ({base} has none of its own)"


@pytest.mark.parametrize("ending", ["-Base", "-pt"])
def test_a_name_that_says_base_is_borrowed_for_without_it(tmp_path: Path, ending: str) -> None:
    base = base_and_sibling(tmp_path, "-it").rename(tmp_path / f"model{ending}")
    borrowed = borrowed_template(load_tokenizer(str(base)), str(base))
    assert borrowed.donor == str(tmp_path / "model-it")


def test_a_named_tokenizer_lends_its_template_even_to_one_that_has_its_own(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("another")
    tokenizer = load_tokenizer(str(TINY))
    assert borrowed_template(tokenizer, "x").reason == ""
    assert borrowed_template(tokenizer, "x").template == tokenizer.chat_template
    borrowed = borrowed_template(tokenizer, "x", str(copy))
    assert borrowed.template == "another"
    assert "--chat-template-from" in borrowed.reason


def test_a_template_that_writes_tokens_which_the_tokenizer_lacks_is_not_borrowed(
    copy: Path,
) -> None:
    lender = load_tokenizer(str(copy))
    lender.add_special_tokens({"additional_special_tokens": ["<|of the lender|>"]})
    save_tokenizer(lender, "<|im_start|><|of the lender|>", copy)
    tokenizer = load_tokenizer(str(TINY))
    with pytest.raises(
        DataError, match=r"writes <\|of the lender\|>, for which --tokenizer base has"
    ):
        borrowed_template(tokenizer, "base", str(copy))


def test_without_a_sibling_or_a_network_the_error_names_what_was_tried(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    (copy / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(str(copy))
    with pytest.raises(DataError, match=r"none of .*-it, .*-Instruct can lend.*no such directory"):
        borrowed_template(tokenizer, str(copy))

    def no_network(*_args: object, **_more: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    with pytest.raises(DataError, match="the Hub cannot be asked: no route to host"):
        borrowed_template(tokenizer, "some/base")
    with pytest.raises(DataError, match="--chat-template-from /nowhere/x is not a directory"):
        borrowed_template(tokenizer, "some/base", "/nowhere/x")
    with pytest.raises(DataError, match="has no chat template: name another tokenizer"):
        borrowed_template(tokenizer, "some/base", str(copy))


def test_code_that_comes_with_a_tokenizer_is_not_run(copy: Path) -> None:
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
    config["tokenizer_class"] = "Own"
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    ran = copy / "ran"
    (copy / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    with contextlib.suppress(DataError):
        load_tokenizer(str(copy))
    assert not ran.exists()


def test_loading_and_preparing_do_not_import_torch() -> None:
    code = (
        "import sys; from ds_sft.data import prepare, inspect, tokenizer;"
        "assert 'transformers' not in sys.modules;"
        f"tokenizer.load_tokenizer({str(TINY)!r});"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
