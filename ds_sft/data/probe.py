"""What a short conversation shows of a chat template, before any row is read.

Owns the refusal of a template that cannot tell what to train, and what a person should know of one
that can (`warnings`). Left to others: rows (`turns`).
"""

from __future__ import annotations

import re

from ds_sft.data.records import Message
from ds_sft.data.template import ChatTemplate, Span, Unrenderable
from ds_sft.errors import DataError

# A code point that Unicode sets aside for use inside a program, so that no row contains it.
PLACEHOLDER = "\ufdd2"

# `<|end|>`, `</s>`, `[/INST]`: what ends a turn, with the blanks after it.
_ENDS_IN_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*\Z")


class Probe:
    """What a short conversation shows of a template. Raises DataError if it cannot be used."""

    stop: str
    """What follows the content of the last turn: stop token, newline."""
    last_only: str
    """The end of it that is not written once the conversation goes on (Phi-3's end of text)."""
    no_thought: str
    """What the generation prompt ends with when thinking is off, beyond its usual end."""
    marked_header: str
    """The part of the generation prompt that the marks enclose; it is given all the same."""
    trains_stop: bool
    """Whether the stop is trained."""
    warnings: list[str]
    """What a person should know of this template, one sentence each."""

    def __init__(self, template: ChatTemplate) -> None:
        chat: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PLACEHOLDER},
        ]
        self._template = template
        try:
            text, marks = template.render_marked(chat, None)
            asked = template.render(chat[:1], None)
            prompt = template.render(chat[:1], None, add_generation_prompt=True)
        except Unrenderable as error:
            raise DataError(
                f"chat template {template.name} cannot render a user and an assistant turn "
                f"({error.detail}): choose another --chat-template"
            ) from None
        before, found, self.stop = text.partition(PLACEHOLDER)
        if not found:
            self._refuse("writes nothing of an assistant's text content")
        self.warnings = []
        self.marked_header = ""
        if template.has_marks:
            self._look_at_marks(text, marks, prompt, before)
        else:
            self.trains_stop = True
            self._check_prefixes(text, asked, prompt)
        self.last_only = self._ending_of_the_last(chat, text, len(before) + 1)
        self.no_thought = self._prompt_without_thinking(chat, prompt)

    def _refuse(self, why: str) -> None:
        raise DataError(
            f"chat template {self._template.name} {why}: choose another --chat-template"
        )

    def _check_prefixes(self, text: str, asked: str, prompt: str) -> None:
        name = f"chat template {self._template.name} has no {{% generation %}} marks and"
        remedy = "put marks into it, or choose another --chat-template"
        if not (prompt.startswith(asked) and len(prompt) > len(asked)):
            missing = "no generation prompt"
        elif not self.stop.strip():
            missing = "no stop token"
        elif not text.startswith(prompt):
            own = prompt[_shared(prompt, text) :]
            raise DataError(
                f"{name} its generation prompt goes on with {own!r}, as no answer that it renders "
                f"does, so nothing could be trained as it is asked: {remedy}"
            )
        else:
            return
        raise DataError(f"{name} {missing}, so what to train cannot be told: {remedy}")

    def _look_at_marks(self, text: str, marks: list[Span], prompt: str, before: str) -> None:
        if not marks:
            raise DataError(
                f"chat template {self._template.name} marks nothing of an assistant turn: put the "
                "turn's content and stop token inside {% generation %}"
            )
        given = _shared(prompt, before)
        self.marked_header = text[marks[0][0] : given]
        if len(prompt) > given:
            self.warnings.append(
                f"the generation prompt of chat template {self._template.name} goes on with "
                f"{prompt[given:]!r} at inference, which no answer is trained to follow"
            )
        stop_end = len(before) + 1 + len(self.stop.rstrip())
        inside = any(a <= len(before) + 1 and stop_end <= b for a, b in marks)
        self.trains_stop = inside and bool(self.stop.strip())
        if not self.trains_stop:
            self.warnings.append(
                f"chat template {self._template.name} leaves the stop token outside its marks: "
                "the model will not learn to end its turn"
            )

    def _ending_of_the_last(self, chat: list[Message], text: str, content_end: int) -> str:
        try:
            longer = self._template.render([*chat, *chat], None)
        except Unrenderable:
            return ""
        shared = _shared(text, longer)
        # Both may go on with `<|`: what they share ends with a whole tag.
        for end in range(shared, content_end, -1):
            if _ENDS_IN_TAG.search(text, content_end, end):
                return text[end:]
        return ""

    def _prompt_without_thinking(self, chat: list[Message], prompt: str) -> str:
        try:
            off = self._template.render(
                chat[:1], None, add_generation_prompt=True, enable_thinking=False
            )
        except Unrenderable:
            return ""
        return off.removeprefix(prompt) if off.startswith(prompt) else ""


def _shared(first: str, second: str) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
