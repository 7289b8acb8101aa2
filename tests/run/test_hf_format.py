from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ds_sft.errors import CheckpointError
from ds_sft.run.hf_format import (
    ExportSource,
    check_source,
    exported_config,
    has_chat_template,
    portable_tokenizer_config,
    write_tokenizer,
    write_unchanging_files,
)

TOKENIZER = Path(__file__).resolve().parents[1] / "golden" / "tiny_tokenizer"
TOKENS = 259
CHAT = [{"role": "user", "content": "Hi <|im_end|> é 你"}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture
def source(tmp_path: Path) -> ExportSource:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER, tokenizer)
    config = {"model_type": "qwen3", "vocab_size": 301, "odd": {"a": [1]}, "dtype": "float32"}
    return ExportSource(config=config, tokenizer_dir=tokenizer, generation_config=None)


def test_dtype_is_stated_under_both_names_and_other_keys_stay(source: ExportSource) -> None:
    config = exported_config(source.config, dtype="bfloat16", tied=False)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is False
    assert {k: config[k] for k in ("model_type", "vocab_size", "odd")} == {
        k: source.config[k] for k in ("model_type", "vocab_size", "odd")
    }
    assert source.config["dtype"] == "float32"


@pytest.mark.parametrize("tied", [True, False])
def test_a_tie_flag_that_contradicts_the_weights_is_refused(tied: bool) -> None:
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=.*lm_head\.weight"):
        exported_config({"tie_word_embeddings": not tied}, dtype="bfloat16", tied=tied)


def test_the_tokenizer_gets_a_token_for_every_row(source: ExportSource, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(source.tokenizer_dir, out, 301)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 301
    assert tokenizer.convert_ids_to_tokens(TOKENS) == "<|padding_0|>"
    assert tokenizer.convert_ids_to_tokens(300) == f"<|padding_{300 - TOKENS}|>"
    assert tokenizer.decode([300]) == f"<|padding_{300 - TOKENS}|>"


def with_image_token(tokenizer: Path, **own: object) -> None:
    path = tokenizer / "tokenizer.json"
    content = json.loads(path.read_text())
    image = {**content["added_tokens"][-1], "id": TOKENS, "content": "<image>", "special": True}
    content["added_tokens"].append({**image, **own})
    path.write_text(json.dumps(content))


def test_a_token_for_images_needs_no_row(source: ExportSource, tmp_path: Path) -> None:
    """As of Gemma 3's text models, whose tokenizer has one token more than they have rows."""
    with_image_token(source.tokenizer_dir)
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(source.tokenizer_dir, out, TOKENS)
    written, given = ((d / "tokenizer.json").read_bytes() for d in (out, source.tokenizer_dir))
    assert written == given
    assert len(AutoTokenizer.from_pretrained(out)) == TOKENS + 1


@pytest.mark.parametrize("kind", ["ordinary", "end of text"])
def test_a_token_of_use_needs_a_row(kind: str, source: ExportSource, tmp_path: Path) -> None:
    with_image_token(source.tokenizer_dir, **({"special": False} if kind == "ordinary" else {}))
    if kind == "end of text":
        path = source.tokenizer_dir / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<image>"}))
    with pytest.raises(CheckpointError, match="260 tokens but the model has only 259 rows"):
        write_tokenizer(source.tokenizer_dir, tmp_path, TOKENS)


def test_padding_changes_neither_encoding_nor_rendering(
    source: ExportSource, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(source.tokenizer_dir, out, 301)
    before, after = AutoTokenizer.from_pretrained(TOKENIZER), AutoTokenizer.from_pretrained(out)
    assert after.apply_chat_template(CHAT, tokenize=False) == before.apply_chat_template(
        CHAT, tokenize=False
    )
    text = "a  b\n\tpadding_0 <|im_start|>ü"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.get_vocab().items() >= before.get_vocab().items()
    assert after.eos_token_id == before.eos_token_id
    assert after.pad_token_id == before.pad_token_id


def test_a_padded_tokenizer_is_copied_byte_for_byte(source: ExportSource, tmp_path: Path) -> None:
    for name, start in (("one", source.tokenizer_dir), ("two", tmp_path / "one")):
        (tmp_path / name).mkdir()
        write_tokenizer(start, tmp_path / name, 301)
    first = (tmp_path / "one" / "tokenizer.json").read_bytes()
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == first


def test_padding_goes_on_after_padding_that_is_there(source: ExportSource, tmp_path: Path) -> None:
    for name, start, size in (("one", source.tokenizer_dir, 261), ("two", tmp_path / "one", 263)):
        (tmp_path / name).mkdir()
        write_tokenizer(start, tmp_path / name, size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two")
    assert tokenizer.convert_ids_to_tokens([259, 260, 261, 262]) == [
        f"<|padding_{i}|>" for i in range(4)
    ]


def test_a_tokenizer_larger_than_the_model_is_refused(source: ExportSource) -> None:
    with pytest.raises(CheckpointError, match="259 tokens but the model has only 258 rows"):
        write_tokenizer(source.tokenizer_dir, source.tokenizer_dir, 258)


def test_what_transformers_5_writes_is_turned_into_what_4_reads() -> None:
    written = {"extra_special_tokens": ["<a>"], "tokenizer_class": "TokenizersBackend", "x": 1}
    assert portable_tokenizer_config(written) == {
        "additional_special_tokens": ["<a>"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "x": 1,
    }
    unchanged = {"extra_special_tokens": {}, "tokenizer_class": "Qwen2Tokenizer"}
    assert portable_tokenizer_config(unchanged) == unchanged


def test_a_tokenizer_saved_by_this_transformers_survives(
    source: ExportSource, tmp_path: Path
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    before = AutoTokenizer.from_pretrained(source.tokenizer_dir)
    before.save_pretrained(saved)
    out.mkdir()
    write_tokenizer(saved, out, 301)
    after = AutoTokenizer.from_pretrained(out)
    assert set(after.all_special_tokens) == set(before.all_special_tokens)
    assert after.apply_chat_template(CHAT) == before.apply_chat_template(CHAT)
    assert len(after) == 301


def test_an_older_list_of_added_tokens_is_kept_in_step(
    source: ExportSource, tmp_path: Path
) -> None:
    """Classes such as Qwen2Tokenizer read added tokens from that list alone, if it is there."""
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(source.tokenizer_dir, out, 301)
    listed = json.loads((out / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    in_file = json.loads((out / "tokenizer.json").read_text())["added_tokens"]
    assert len(listed) == 301 - 256
    assert {int(i): t["content"] for i, t in listed.items()} == {
        t["id"]: t["content"] for t in in_file
    }
    before = json.loads((source.tokenizer_dir / "tokenizer_config.json").read_text())
    assert listed.items() >= before["added_tokens_decoder"].items()


def test_a_tokenizer_with_gaps_in_its_ids_is_refused(source: ExportSource) -> None:
    file = source.tokenizer_dir / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][-1]["id"] = 270
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"gaps in its ids \(259 tokens, largest id 270\)"):
        check_source(source)


def test_generation_config_is_copied_verbatim_even_if_transformers_would_refuse_it(
    source: ExportSource, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.7,\n "do_sample": false}')
    out = tmp_path / "out"
    out.mkdir()
    wanted = ExportSource(
        config=source.config, tokenizer_dir=source.tokenizer_dir, generation_config=file
    )
    check_source(wanted)
    write_unchanging_files(out, wanted, dtype="bfloat16", tied=True)
    assert (out / "generation_config.json").read_bytes() == file.read_bytes()


def test_no_generation_config_unless_asked(source: ExportSource, tmp_path: Path) -> None:
    (source.tokenizer_dir / "generation_config.json").write_text("{}")
    (source.tokenizer_dir / "model.safetensors").write_text("not a tokenizer's file")
    out = tmp_path / "out"
    out.mkdir()
    write_unchanging_files(out, source, dtype="float16", tied=True)
    assert sorted(p.name for p in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"


def test_check_source_accepts_a_good_one(source: ExportSource) -> None:
    check_source(source)
    assert has_chat_template(source.tokenizer_dir, {})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.config.update(vocab_size=100), "259 tokens but the model has only 100 rows"),
        (lambda s: s.config.pop("vocab_size"), "no vocab_size"),
        (lambda s: (s.tokenizer_dir / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda s: (s.tokenizer_dir / "tokenizer.json").write_text("{}"), "is not a tokenizer of"),
        (lambda s: (s.tokenizer_dir / "chat_template.jinja").unlink(), "no chat template"),
        (lambda s: (s.tokenizer_dir / "tokenizer_config.json").write_text("{"), "read as JSON"),
    ],
)
def test_a_bad_source_is_found_before_training(source: ExportSource, spoil, message: str) -> None:
    spoil(source)
    with pytest.raises(CheckpointError, match=message):
        check_source(source)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_broken_generation_config_is_found_before_training(
    source: ExportSource, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(content)
    broken = ExportSource(
        config=source.config, tokenizer_dir=source.tokenizer_dir, generation_config=file
    )
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        check_source(broken)
