"""Masks: exactly what the template marks, or what the prefixes cut; never wrong or empty."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from ds_sft.data import chat
from ds_sft.data.chat import ChatEncoder, Document
from ds_sft.data.collate import IGNORE, collate
from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.template import ChatTemplate, read_template
from ds_sft.data.tokenizer import load_backend
from ds_sft.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden"
CHAT_MASK = json.loads((GOLDEN / "chat_mask.json").read_text())
RENDERS = json.loads((GOLDEN / "qwen3_renders.json").read_text())["cases"]
BACKEND = load_backend(GOLDEN / "tiny_tokenizer" / "tokenizer.json")

CHATML = CHAT_MASK["template"]
# As Llama 3.1 does: content is trimmed, a turn with a tool call ends in another stop.
TWO_STOPS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}:{% if m.tool_calls %}"
    "{% generation %}{{ m.tool_calls[0].function.name }}<|endoftext|>{% endgeneration %}"
    "{% elif m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|im_end|>{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant:{%- endif %}"
)


def without_marks(template: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def encode_all(
    template: str, *messages: dict[str, Any], backend: Tokenizer = BACKEND, **choices: Any
) -> Any:
    encoder = ChatEncoder(ChatTemplate(template, {}), backend, **choices)
    return encoder.encode([Conversation(messages=list(messages), tools=None)])[0]


def encode(
    template: str, *messages: dict[str, Any], backend: Tokenizer = BACKEND, **choices: Any
) -> Any:
    return single(encode_all(template, *messages, backend=backend, **choices))


def single(result: Any) -> Any:
    """The one document of a row, or why there is none."""
    if isinstance(result, Rejected):
        return result
    assert len(result) == 1
    return result[0]


def trained_text(result: Any, backend: Tokenizer = BACKEND) -> str:
    assert isinstance(result, Document), result
    kept = result.tokens[result.assistant_mask == 1].tolist()
    return str(backend.decode(kept, skip_special_tokens=False))


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)], ids=["marks", "prefixes"])
@pytest.mark.parametrize("case", CHAT_MASK["cases"], ids=lambda case: case["masked_text"].strip())
def test_ids_and_masks_are_levanters(case: dict, template: str) -> None:
    result = encode(template, *case["messages"])
    assert result.tokens.tolist() == case["input_ids"]
    assert result.assistant_mask.tolist() == case["assistant_masks"]
    assert trained_text(result) == case["masked_text"]


def test_a_conversation_without_an_assistant_is_rejected_as_levanter_does() -> None:
    for template in (CHATML, without_marks(CHATML)):
        result = encode(template, *CHAT_MASK["no_assistant_message"]["messages"])
        assert isinstance(result, Rejected)
        assert result.reason == "no_trained_token"


def test_a_turn_after_the_last_answer_is_context_only() -> None:
    for template in (CHATML, without_marks(CHATML)):
        assert trained_text(encode(template, user("a"), answer("b"), user("c"))) == "b<|im_end|>\n"


def test_prefixes_find_another_stop_after_a_tool_call() -> None:
    call = answer("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    chat = [
        user("a"),
        call,
        {"role": "tool", "content": "r"},
        answer(" b "),
        user("c"),
        answer("d"),
    ]
    results = [encode(template, *chat) for template in (TWO_STOPS, without_marks(TWO_STOPS))]
    assert [trained_text(result) for result in results] == [
        "f<|endoftext|>b<|im_end|>d<|im_end|>"
    ] * 2


def test_the_shipped_template_trains_the_spans_of_every_golden_conversation() -> None:
    template = ChatTemplate(read_template("qwen3"), {})
    encoder = ChatEncoder(template, BACKEND, on_rewrite="levanter")
    for case in RENDERS:
        row = Conversation(messages=case["messages"], tools=case["tools"])
        text, spans = template.render_marked(row.messages, row.tools)
        if spans:
            expected = "".join(text[start:end] for start, end in spans)
            assert trained_text(single(encoder.encode([row])[0])) == expected


def test_a_template_whose_prompt_reads_otherwise_in_the_answer_rejects_the_row() -> None:
    forgetful = without_marks(CHATML).replace(
        "message.content + '<|im_end|>\\n'",
        "(message.content if loop.index > messages|length - 2 else '-') + '<|im_end|>\\n'",
    )
    assert forgetful != without_marks(CHATML)
    result = encode(forgetful, user("a"), answer("b"), user("c"), answer("d"))
    assert isinstance(result, Rejected)
    assert result.reason == "prompt_rewritten"


def test_two_assistant_turns_in_a_row_are_two_answers() -> None:
    for template in (CHATML, without_marks(CHATML)):
        result = encode(template, user("a"), answer("b"), answer("c"))
        assert trained_text(result) == "b<|im_end|>\nc<|im_end|>\n"


@pytest.mark.parametrize("batch_bytes", [1, chat.BATCH_BYTES])
def test_each_row_of_a_batch_keeps_its_place(
    batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "BATCH_BYTES", batch_bytes)
    encoder = ChatEncoder(ChatTemplate(CHATML, {}), BACKEND)
    good = Conversation(messages=[user("a"), answer("b")], tools=None)
    empty = Conversation(messages=[user("a")], tools=None)
    broken = Conversation(messages=[{"role": "user"}, answer("b")], tools=None)
    surrogate = Conversation(messages=[user("\ud800"), answer("b")], tools=None)
    results = encoder.encode([broken, good, empty, surrogate, good])
    kinds = [r.reason if isinstance(r, Rejected) else "ok" for r in results]
    assert kinds == ["template_error", "ok", "no_trained_token", "lone_surrogate", "ok"]
    assert encoder.encode([]) == []


# --- tokenizers that merge across the edge, normalize, or are not byte-level ---


def merging_tokenizer(special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Tokenizer:
    """A byte-level BPE with NFC, as Qwen's, that knows the token of two newlines.

    The special tokens have the first ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["user\n\n\nhello there\n\n", "\n\nhello the assistant\n\n"] * 9, trainer
    )
    assert len(tokenizer.encode("\n\n", add_special_tokens=False).ids) == 1
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)], ids=["marks", "prefixes"])
def test_a_token_across_the_edge_rejects_the_row(template: str) -> None:
    backend = merging_tokenizer()
    result = encode(template, user("q"), answer("\n\nhello"), backend=backend)
    assert isinstance(result, Rejected)
    assert result.reason == "edge_inside_token"
    fine = encode(template, user("\nq"), answer("hello\n\nthere\n"), backend=backend)
    assert trained_text(fine, backend) == "hello\n\nthere\n<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)], ids=["marks", "prefixes"])
def test_text_that_the_tokenizer_normalizes_is_masked_by_offsets(template: str) -> None:
    backend = merging_tokenizer()
    decomposed = "e\u0301 there e\u0301"
    result = encode(template, user(decomposed), answer(decomposed), backend=backend)
    assert trained_text(result, backend) == "\u00e9 there \u00e9<|im_end|>\n"
    composed = encode(
        template, user("\u00e9 there \u00e9"), answer("\u00e9 there \u00e9"), backend=backend
    )
    assert np.array_equal(result.tokens, composed.tokens)
    assert np.array_equal(result.assistant_mask, composed.assistant_mask)


def test_an_accent_that_joins_the_header_rejects_the_row() -> None:
    template = CHATML.replace("assistant\\n", "assistante")
    result = encode(template, user("q"), answer("\u0301x"), backend=merging_tokenizer())
    assert isinstance(result, Rejected)
    assert result.reason in ("edge_inside_token", "decoded_tokens_differ")


def sentencepiece_like() -> Tokenizer:
    """Metaspace and byte fallback, as Llama 2's and Gemma's tokenizers."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdehlo",
        "he",
        "llo",
    ]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("ll", "o")]
    vocab["ll"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in ("<|im_start|>", "<|im_end|>")
        ]
    )
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)], ids=["marks", "prefixes"])
def test_a_tokenizer_that_is_not_byte_level_is_masked_by_offsets(template: str) -> None:
    backend = sentencepiece_like()
    result = encode(
        template, user("hello é"), answer("a hello 中 b"), user("c"), answer("d"), backend=backend
    )
    assert isinstance(result, Document), result
    ids = result.tokens.tolist()
    assert backend.token_to_id("llo") in ids
    trained = [backend.id_to_token(i) for i, m in zip(ids, result.assistant_mask, strict=True) if m]
    assert trained.count("<|im_end|>") == 2
    assert trained[0] == "a"
    assert "<0xE4>" in trained
    assert "<|im_start|>" not in trained


def test_a_stop_that_is_also_the_padding_is_trained_and_the_padding_is_not(tmp_path: Path) -> None:
    backend = merging_tokenizer(("<|im_end|>", "<|im_start|>"))
    assert backend.token_to_id("<|im_end|>") == 0
    document = encode(CHATML, user("a"), answer("b"), user("c"), answer("d"), backend=backend)
    length = len(document.tokens)
    with PackedWriter(tmp_path / "data", max_seq_len=length + 9) as writer:
        writer.add_pack(document.tokens, document.assistant_mask, [length])
        writer.commit({})
    data = PackedDataset.open(tmp_path / "data")
    assert data.tokens[0][length:].tolist() == [0] * 9
    targets = collate(data, [0], num_active=1).targets
    assert (targets[: length - 1] == 0).sum() == 2
    assert (targets[length - 1 :] == IGNORE).all()


@pytest.mark.parametrize("backend", [sentencepiece_like(), merging_tokenizer()], ids=["sp", "bpe"])
def test_all_leaves_out_every_token_that_touches_what_is_not_trained(backend: Tokenizer) -> None:
    # The BPE has one token for the newline of the header and the one that is hidden.
    hidden = {**user("\n\nhello hello"), "train": False}
    document = encode(CHATML, hidden, answer("a hello b"), backend=backend, train_on="all")
    text = trained_text(document, backend)
    assert text.count("hello") == 1
    assert "\n\n" not in text
    assert "a hello b<|im_end|>" in text
    assert document.assistant_mask[0] == 0


# --- templates that cannot tell what to train ---


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[1].content if messages[1] }}", "no generation prompt"),
        ("{{ messages[0].content }}", "writes nothing of an assistant's text content"),
        (without_marks(CHATML).replace("<|im_end|>\\n", ""), "no stop token"),
        (CHATML.replace("message.role == 'assistant'", "message.role == 'bot'"), "marks nothing"),
        ("{{ raise_exception('no system') }}", "cannot render a user and an assistant turn"),
    ],
)
def test_a_template_that_cannot_tell_what_to_train_is_refused(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatEncoder(ChatTemplate(template, {}, "x.jinja"), BACKEND)


def test_a_stop_outside_the_marks_is_told() -> None:
    outside = CHATML.replace(
        "message.content + '<|im_end|>\\n' }}{% endgeneration %}",
        "message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}",
        1,
    )
    assert outside != CHATML
    for template in (CHATML, read_template("qwen3"), without_marks(CHATML)):
        assert ChatEncoder(ChatTemplate(template, {}), BACKEND).warnings == []
    [warning] = ChatEncoder(ChatTemplate(outside, {}, "x.jinja"), BACKEND).warnings
    assert warning.startswith("chat template x.jinja leaves the stop token outside its marks")


def test_a_think_block_that_the_prompt_opens_is_told() -> None:
    backend = Tokenizer.from_str(BACKEND.to_str())
    backend.add_tokens(["\n\n"])  # as in large vocabularies
    opened = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}"
    off = "{%- if enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    chat = (
        "{%- for turn in messages %}{{- '<|im_start|>' + turn.role + '\\n' }}"
        "{%- if turn.role == 'assistant' %}"
        "{{- '<think>\\n' + (turn.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}"
        "{{- turn.content + '<|im_end|>\\n' }}{%- endfor %}"
    )
    for prompt, way_out in (
        (opened + off, "--thinking drop-empty trains them"),
        (opened + "{%- endif %}", "answers with reasoning"),
    ):
        template = ChatTemplate(chat + prompt, {}, "x.jinja")
        [warning] = ChatEncoder(template, backend).warnings
        assert warning.startswith("chat template x.jinja begins an answer without reasoning inside")
        assert way_out in warning
    template = ChatTemplate(chat + opened + off, {}, "x.jinja")
    assert ChatEncoder(template, backend, thinking="drop-empty").warnings == []
