"""Reasoning in a conversation, before it is rendered: `--thinking`.

- `keep`: as it is in the data.
- `strip-history`: an assistant's turn before the last one loses its reasoning.
- `drop`: every assistant's turn loses it.
- `drop-empty`: reasoning that is blank is no reasoning: the empty block goes from the data, and an
  empty block that the template writes all the same is given and not trained (`turns`), as when the
  model is asked with thinking off.

Reasoning is the message's field, or the `<think> ... </think>` that its content begins with. In a
message without the field it is also what precedes a `</think>` that nothing opens: where the prompt
opens the block, a model's answer has its end only. A `</think>` elsewhere is text, and so is one
that stands in a line as a word of its own, or quoted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from ds_sft.data.records import Message

Thinking = Literal["keep", "strip-history", "drop-empty", "drop"]

_FIELDS = ("reasoning_content", "thinking", "reasoning")
_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_AS_A_WORD = r"""(?<=[ `'"(])</think>[ `'".,;:!?)]"""
_END_OF_BLOCK = re.compile(rf"((?:(?!<think>).)*?)(?!{_AS_A_WORD})</think>\s*", re.DOTALL)


def prepare_thinking(
    messages: Sequence[Message], thinking: Thinking, last_turn: int
) -> list[Message]:
    """The messages with the reasoning that is kept; `last_turn`: the assistant's last message."""
    if thinking == "keep":
        return list(messages)
    return [
        _without_reasoning(turn, blank_only=thinking == "drop-empty")
        if turn["role"] == "assistant" and (thinking != "strip-history" or place != last_turn)
        else turn
        for place, turn in enumerate(messages)
    ]


def _without_reasoning(turn: Message, *, blank_only: bool) -> Message:
    kept = dict(turn)
    for name in _FIELDS:
        if name in kept and (not blank_only or not kept[name].strip()):
            del kept[name]
    block = _BLOCK.match(kept["content"])
    if block is None and not any(name in turn for name in _FIELDS):
        block = _END_OF_BLOCK.match(kept["content"])
    if block and (not blank_only or not block[1].strip()):
        kept["content"] = kept["content"][block.end() :]
    return kept
