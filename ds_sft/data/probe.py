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

_USER: Message = {"role": "user", "content": "?"}
_FUNCTION = {"name": "f", "arguments": {}}
_CALL = {"id": "0", "type": "function", "function": {**_FUNCTION, "name": PLACEHOLDER}}

# `<|end|>`, `</s>`, `[/INST]`: what ends a turn, with the blanks after it.
_ENDS_IN_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*\Z")


class Probe:
    """What a template does with a user and an assistant turn."""

    stop: str
    """What follows the content of the last turn: stop token, newline."""
    last_only: str
    """The end of it that is not written once the conversation goes on (Phi-3's end of text)."""
    no_thought: str
    """What the generation prompt ends with when thinking is off, beyond its usual end."""
    marks_are_answers: bool
    """Whether the marks begin where the generation prompt ends, with any kind of answer, and hold
    nothing of users and tools."""
    max_calls: int | None
    """Tool calls that it writes of one turn, 2 for any number; None: it says so itself."""
    writes_reasoning: bool
    """Whether it writes the reasoning of an answer that ends a text."""
    warnings: list[str]
    """What a person should know of this template, one sentence each."""

    def __init__(self, template: ChatTemplate, *, any_prompt: bool = False) -> None:
        """Raises DataError if it cannot be told what to train.

        `any_prompt`: what precedes an answer need not be the generation prompt.
        """
        self._template = template
        self._name = f"chat template {template.name}"
        self.warnings = []
        chat = [_USER, {"role": "assistant", "content": PLACEHOLDER}]
        try:
            text, marks = template.render_marked(chat, None)
            asked = template.render([_USER], None)
            prompt = template.render([_USER], None, add_generation_prompt=True)
        except Unrenderable as error:
            raise DataError(
                f"{self._name} cannot render a user and an assistant turn ({error.detail}): choose "
                "another --chat-template"
            ) from None
        before, found, self.stop = text.partition(PLACEHOLDER)
        if not found:
            raise DataError(
                f"{self._name} writes nothing of an assistant's text content: choose another "
                "--chat-template"
            )
        if template.has_marks:
            self._look_at_marks(text, marks, len(before) + 1)
        else:
            self._look_for_ends(asked, prompt)
        self.no_thought = self._prompt_without_thinking(prompt)
        self._compare_with_prompt(prompt, prompt[_shared(asked, prompt) :], any_prompt)
        self.marks_are_answers &= not self._marks_others()
        self.last_only = self._ending_of_the_last(chat, text, len(before) + 1)
        self.max_calls = self._calls_written()
        self.writes_reasoning = self._reasoning_written()

    def _look_for_ends(self, asked: str, prompt: str) -> None:
        if prompt == asked or not self.stop.strip():
            missing = "generation prompt" if prompt == asked else "stop token"
            raise DataError(
                f"{self._name} has no {{% generation %}} marks and no {missing}, so what to train "
                "cannot be told: put marks into it, or choose another --chat-template"
            )

    def _look_at_marks(self, text: str, marks: list[Span], content_end: int) -> None:
        if not marks:
            raise DataError(
                f"{self._name} marks nothing of an assistant turn: put the turn's content and stop "
                "token inside {% generation %}"
            )
        stop_end = content_end + len(self.stop.rstrip())
        inside = any(start <= content_end and stop_end <= end for start, end in marks)
        if not (inside and self.stop.strip()):
            self.warnings.append(
                f"{self._name} leaves the stop token outside its marks: the model will not learn "
                "to end its turn"
            )

    def _compare_with_prompt(self, prompt: str, header: str, any_prompt: bool) -> None:
        """Whether answers of any kind begin with the generation prompt."""
        reasoned = {"reasoning_content": "?", "thinking": "?", "reasoning": "?"}
        kinds: list[Message] = [
            {"content": "!"},
            {"content": "!", **reasoned},
            {"content": "<think>\n?\n</think>\n\n!"},
            {"content": "", "tool_calls": [_CALL]},
        ]
        fits: list[bool] = []
        self.marks_are_answers = True
        for kind in kinds:
            try:
                text, marks = self._template.render_marked(
                    [_USER, {"role": "assistant", **kind}], None
                )
            except Unrenderable:
                continue
            between = text[len(prompt) : marks[0][0]] if marks else ""
            fits.append(text.startswith(prompt) and between in ("", self.no_thought))
            self.marks_are_answers &= fits[-1] and bool(marks) and marks[0][0] >= len(prompt)
        if any_prompt:
            return
        if not any(fits):
            way_out = (
                "add --history levanter" if self._template.has_marks else "correct that prompt"
            )
            raise DataError(
                f"{self._name} ends its generation prompt with {header!r}, but no answer that it "
                f"writes begins so, and nothing would be trained as it is asked: {way_out}, or "
                "choose another --chat-template"
            )
        if not fits[0]:
            self.warnings.append(
                f"{self._name} ends its generation prompt with {header!r}, as an answer without "
                "reasoning does not begin: such answers are rejected"
            )

    def _marks_others(self) -> bool:
        asked: Message = {"role": "user", "content": PLACEHOLDER}
        said: Message = {"role": "assistant", "content": "!"}
        called: list[Message] = [
            {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "function": _FUNCTION}]},
            {"role": "tool", "name": "f", "tool_call_id": "0", "content": PLACEHOLDER},
            said,
        ]
        for chat in ([asked, said], [asked, said, asked, *called]):
            try:
                text, marks = self._template.render_marked(chat, None)
            except Unrenderable:
                continue
            if any(PLACEHOLDER in text[start:end] for start, end in marks):
                return True
        return False

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

    def _prompt_without_thinking(self, prompt: str) -> str:
        try:
            off = self._template.render(
                [_USER], None, add_generation_prompt=True, enable_thinking=False
            )
        except Unrenderable:
            return ""
        return off.removeprefix(prompt) if off.startswith(prompt) else ""

    def _reasoning_written(self) -> bool:
        fields = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), PLACEHOLDER)
        try:
            text = self._template.render(
                [_USER, {"role": "assistant", "content": "!", **fields}], None
            )
        except Unrenderable:
            return False
        return PLACEHOLDER in text

    def _calls_written(self) -> int | None:
        for number in (2, 1):
            turn = {"role": "assistant", "content": "", "tool_calls": [_CALL] * number}
            try:
                text = self._template.render([_USER, turn], None)
            except Unrenderable:
                continue
            return text.count(PLACEHOLDER)
        return None


def _shared(first: str, second: str) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
