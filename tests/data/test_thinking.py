"""What counts as reasoning goes or stays as `--thinking` says, and the answer stays whole."""

from __future__ import annotations

import pytest

from ds_sft.data.records import Message
from ds_sft.data.thinking import Thinking, prepare_thinking


def said(content: str, thinking: Thinking = "drop", **more: str) -> Message:
    turn: Message = {"role": "assistant", "content": content, **more}
    return prepare_thinking([turn], thinking, 0)[0]


@pytest.mark.parametrize(
    "content",
    [
        "<think>SECRET</think>answer",
        "\n<think>\nSECRET\n</think>\n\nanswer",
        "SECRET\n</think>\n\nanswer",
        "SECRET.</think>answer",
        "SECRET. </think>\n\nanswer",
        'SECRET: `</think>` is how I end, "</think>" too.\n</think>\n\nanswer',
        "</think>answer",
    ],
)
def test_reasoning_goes_also_where_the_prompt_opened_it(content: str) -> None:
    assert said(content)["content"] == "answer"
    turns: list[Message] = [
        {"role": "assistant", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
    ]
    kept = prepare_thinking(turns, "strip-history", 2)
    assert [turn["content"] for turn in kept] == ["answer", content, content]


@pytest.mark.parametrize(
    "content",
    [
        "the tag </think> ends it",
        "write `</think>`.",
        'it says "</think>", then stops',
        "first <think>this</think> then that",
        "answer",
    ],
)
def test_a_tag_that_is_spoken_of_is_text(content: str) -> None:
    assert said(content)["content"] == content


def test_where_reasoning_has_its_field_a_closing_tag_is_text() -> None:
    turn = said("one\n</think>\ntwo", reasoning_content="SECRET")
    assert turn == {"role": "assistant", "content": "one\n</think>\ntwo"}


def test_drop_empty_drops_a_block_without_its_opening_only_if_blank() -> None:
    assert said("\n\n</think>\n\nanswer", "drop-empty")["content"] == "answer"
    full = "SECRET\n</think>\n\nanswer"
    assert said(full, "drop-empty")["content"] == full
    assert said(full, "keep")["content"] == full
