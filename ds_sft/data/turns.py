"""Which text of a conversation is trained, and in how many samples.

Owns the rule that a model is trained on what it will be asked at inference and on nothing else. For
the assistant's turn k of `messages`:

- the prompt is `render(messages[:k], generation prompt)`: given, never trained; a row whose
  rendering does not begin with it is rejected (`prompt_rewritten`);
- the answer is what `render(messages[:k + 1])` puts after it: content, tool calls, think block,
  stop token. With `{% generation %}` marks it is what they enclose of that; without, all of it.

A template may write a turn otherwise once the conversation goes on (Qwen3 drops its reasoning,
gpt-oss changes its stop token). So a sample trains turn k only where its text begins with
`render(messages[:k + 1])`: several turns share a sample as long as that holds. A turn for which it
does not hold gets a sample of its own that ends with it (`split`), or the row is rejected
(`refuse`). `levanter` is for marked templates: one sample, trained on what is marked of its trained
turns in the whole conversation, however they looked when they were asked for.

Left to others: the template (`template`, `append_only`), reasoning (`thinking`), tokens (`chat`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ds_sft.data.probe import PLACEHOLDER, Probe
from ds_sft.data.records import Conversation, Message
from ds_sft.data.template import ChatTemplate, Span, Tools, Unrenderable
from ds_sft.data.thinking import Thinking, prepare_thinking
from ds_sft.errors import DataError

TrainOn = Literal["assistant", "last-assistant", "all"]
OnRewrite = Literal["split", "refuse", "levanter"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A text with what is trained of it."""

    text: str
    spans: list[Span]
    """Characters that are trained, in order, apart from each other, none empty."""
    exact: bool = True
    """A token across the edge of a span is an error; otherwise it is not trained."""


@dataclass(frozen=True, slots=True)
class _Rendering:
    text: str
    marks: list[Span] | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant's turn as it stands when it is the last."""

    place: int
    """Index of its message."""
    start: int
    """Where its answer begins."""
    whole: _Rendering
    """`messages[:place + 1]`."""
    spans: list[Span]
    """What is trained of the answer."""
    body_end: int
    """Where the text ends that stays when the conversation goes on."""


class Turns:
    """Conversations -> samples, with one template and the choices of one data set."""

    def __init__(
        self, template: ChatTemplate, train_on: TrainOn, thinking: Thinking, on_rewrite: OnRewrite
    ) -> None:
        """Raises DataError for a template that cannot tell what to train."""
        self.template = template
        self.train_on = train_on
        self.thinking = thinking
        self.on_rewrite = on_rewrite
        if on_rewrite == "levanter" and not template.has_marks:
            raise DataError(
                f"chat template {template.name} has no {{% generation %}} marks, as --history "
                "levanter needs: use split, or a template with marks (--chat-template qwen3)"
            )
        self._probe = Probe(template, any_prompt=on_rewrite == "levanter")

    @property
    def warnings(self) -> list[str]:
        return self._probe.warnings

    @property
    def no_thought(self) -> str:
        """What the generation prompt ends with when thinking is off, beyond its usual end."""
        return self._probe.no_thought

    def samples(self, row: Conversation) -> list[Sample]:
        """At least one sample, shortest first. Raises Unrenderable."""
        turns = [place for place, turn in enumerate(row.messages) if turn["role"] == "assistant"]
        left_out = {p for p, turn in enumerate(row.messages) if turn.get("train") is False}
        trained = [place for place in turns if place not in left_out]
        if self.train_on == "last-assistant":
            trained = [place for place in trained if place == turns[-1]]
        if not trained:
            raise Unrenderable("no_trained_token", "nothing of the row is trained")
        messages = prepare_thinking(row.messages, self.thinking, turns[-1])
        if left_out:
            messages = [{k: v for k, v in turn.items() if k != "train"} for turn in messages]
        if self.train_on == "all":
            samples = self._all(messages, row.tools, turns, left_out)
        elif trained == turns and self._marks_are_enough(turns, len(messages)):
            text, spans = self.template.render_marked(messages, row.tools)
            samples = [Sample(text, self._without_given_thought(text, spans))]
        elif self.on_rewrite == "levanter":
            samples = [self._marked(messages, row.tools, turns, set(trained))]
        else:
            samples = self._by_turn(messages, row.tools, trained)
        for place in trained:
            is_last = place == len(messages) - 1
            self._check_written(messages[place], place, samples, is_last=is_last)
        return samples

    def _check_written(
        self, turn: Message, place: int, samples: list[Sample], *, is_last: bool
    ) -> None:
        """Refuse a turn of which the template leaves out the calls or the reasoning.

        `levanter` trains what the template makes of the reasoning, unless it never writes any.
        """
        calls, limit = len(turn.get("tool_calls", ())), self._probe.max_calls
        if calls and limit is not None and limit < min(calls, 2):
            detail = f"the template writes {limit} of the {calls} calls of message {place}"
            raise Unrenderable("tool_calls_not_written", detail)
        reasoning = turn.get("reasoning_content", "").strip()
        never = is_last and not self._probe.writes_reasoning
        if reasoning and (never or self.on_rewrite != "levanter"):
            texts = (sample.text[a:b] for sample in samples for a, b in sample.spans)
            if not any(reasoning in text for text in texts):
                detail = (
                    f"that of message {place} is not in the text: add --thinking drop to train "
                    "without, or choose another --chat-template"
                )
                raise Unrenderable("reasoning_not_written", detail)

    def _marks_are_enough(self, turns: list[int], num_messages: int) -> bool:
        """Whether the marks of the whole conversation are those of each turn when it was last."""
        if not self.template.has_marks:
            return False
        if self.on_rewrite == "levanter":
            return True
        alone = turns == [num_messages - 1]
        return (alone or self.template.appends_only) and self._probe.marks_are_answers

    def _marked(
        self, messages: list[Message], tools: Tools, turns: list[int], trained: set[int]
    ) -> Sample:
        """The whole conversation, trained on the marks of some of its turns.

        A turn may read otherwise when it is the last, but has as many marks: those that come with
        it as the conversation grows.
        """
        text, marks = self.template.render_marked(messages, tools)
        ends = [len(self.template.render_marked(messages[: t + 1], tools)[1]) for t in turns]
        spans: list[Span] = []
        for turn, start, end in zip(turns, [0, *ends[:-1]], [*ends[:-1], len(marks)], strict=True):
            if not start < end <= len(marks):
                detail = f"which marks of the text are those of message {turn} cannot be told"
                raise Unrenderable("turn_end_unclear", detail)
            spans += marks[start:end] if turn in trained else []
        return Sample(text, self._without_given_thought(text, spans))

    def _by_turn(self, messages: list[Message], tools: Tools, trained: list[int]) -> list[Sample]:
        whole = self._render(messages, tools)
        pending = [self._turn(messages, tools, place, whole) for place in trained]
        samples: list[Sample] = []
        target = whole
        while pending:
            shared = [turn for turn in pending if self._holds(turn, target)]
            if shared:
                samples.append(self._sample(target, shared))
            pending = [turn for turn in pending if turn not in shared]
            if pending and self.on_rewrite != "split":
                detail = f"message {pending[0].place} changes as the conversation goes on"
                raise Unrenderable("prefix_rewritten", detail)
            target = pending[-1].whole if pending else target
        return samples[::-1]

    def _render(self, messages: list[Message], tools: Tools) -> _Rendering:
        if self.template.has_marks:
            return _Rendering(*self.template.render_marked(messages, tools))
        return _Rendering(self.template.render(messages, tools), None)

    def _turn(self, messages: list[Message], tools: Tools, place: int, whole: _Rendering) -> _Turn:
        if place < len(messages) - 1:
            whole = self._render(messages[: place + 1], tools)
        prompt = self._prompt(messages, tools, place)
        text, start = whole.text, len(prompt)
        if not text.startswith(prompt):
            detail = f"the prompt of message {place} is not how its rendering begins"
            raise Unrenderable("prompt_rewritten", detail)
        if whole.marks is None:
            spans = [(start, len(text))] if start < len(text) else []
        else:
            spans = _clip(whole.marks, start, len(text))
        if not spans:
            raise Unrenderable(
                "nothing_rendered", f"the template writes nothing of message {place}"
            )
        between = text[start : spans[0][0]]
        if between not in ("", self._probe.no_thought):
            detail = f"between the prompt of message {place} and what is marked stands {between!r}"
            raise Unrenderable("prompt_rewritten", detail)
        body_end = len(text.removesuffix(self._probe.last_only))
        return _Turn(place, start, whole, self._without_given_thought(text, spans), body_end)

    def _prompt(self, messages: list[Message], tools: Tools, place: int) -> str:
        try:
            return self.template.render(messages[:place], tools, add_generation_prompt=True)
        except Unrenderable:
            if any(turn["role"] == "user" for turn in messages[:place]):
                raise
            detail = "the row begins with an assistant turn, to which the template has no prompt"
            raise Unrenderable("begins_with_assistant", detail) from None

    def _holds(self, turn: _Turn, target: _Rendering) -> bool:
        """Whether what precedes the turn's answer, and the answer, stand unchanged in `target`."""
        if target is turn.whole:
            return True
        if not target.text.startswith(turn.whole.text[: turn.body_end]):
            return False
        if target.marks is None or turn.whole.marks is None:
            return True
        within = turn.start, turn.body_end
        return _clip(target.marks, *within) == _clip(turn.whole.marks, *within)

    def _sample(self, target: _Rendering, turns: list[_Turn]) -> Sample:
        spans: list[Span] = []
        for turn in turns:
            end = len(turn.whole.text) if target is turn.whole else turn.body_end
            spans += _clip(turn.spans, turn.start, end)
        return Sample(target.text, spans)

    def _without_given_thought(self, text: str, spans: list[Span]) -> list[Span]:
        """With `drop-empty`, a think block that the prompt would open and close is given."""
        block = self._probe.no_thought
        if self.thinking != "drop-empty" or not block:
            return spans
        moved = [
            (start + len(block) if text.startswith(block, start, end) else start, end)
            for start, end in spans
        ]
        return [(start, end) for start, end in moved if start < end]

    # --- train on all ---

    def _all(
        self, messages: list[Message], tools: Tools, turns: list[int], left_out: set[int]
    ) -> list[Sample]:
        """The whole text but tool results, and a sample for each turn that it shows otherwise."""
        whole = self._render(messages, tools)
        rewritten: list[_Turn] = []
        if self.on_rewrite != "levanter" and not self.template.appends_only:
            every = [self._turn(messages, tools, place, whole) for place in turns]
            rewritten = [turn for turn in every if not self._holds(turn, whole)]
        if rewritten and self.on_rewrite == "refuse":
            detail = f"message {rewritten[0].place} changes as the conversation goes on"
            raise Unrenderable("prefix_rewritten", detail)
        given = left_out | {turn.place for turn in rewritten}
        given |= {place for place, turn in enumerate(messages) if turn["role"] == "tool"}
        places = [self._place_in(whole.text, messages, tools, place) for place in sorted(given)]
        samples = [
            self._sample(turn.whole, [turn]) for turn in rewritten if turn.place not in left_out
        ]
        return [*samples, Sample(whole.text, _between(places, len(whole.text)), exact=False)]

    def _place_in(self, text: str, messages: list[Message], tools: Tools, place: int) -> Span:
        """Where the text has a message's content (an assistant's: with its calls and stop)."""
        role = messages[place]["role"]
        stand_in = (
            {"role": role, "content": PLACEHOLDER}
            if role == "assistant"
            else {**messages[place], "content": PLACEHOLDER}
        )
        replaced = [*messages[:place], stand_in, *messages[place + 1 :]]
        head, found, tail = self.template.render(replaced, tools).partition(PLACEHOLDER)
        if role == "assistant":
            tail = tail.removeprefix(self._probe.stop)
        start, end = len(head), len(text) - len(tail)
        if not (found and text.startswith(head) and text.endswith(tail) and start <= end):
            raise Unrenderable("turn_end_unclear", f"the end of message {place} cannot be told")
        return start, end


def _clip(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What of the spans lies in [start, end)."""
    clipped = [(max(a, start), min(b, end)) for a, b in spans]
    return [(a, b) for a, b in clipped if a < b]


def _between(places: Sequence[Span], length: int) -> list[Span]:
    """The text outside `places`."""
    edges = [0, *(edge for place in sorted(places) for edge in place), length]
    gaps = list(pairwise(edges))[::2]
    return [(start, end) for start, end in gaps if start < end]
