"""Conversations -> token ids and the assistant mask.

What is trained (mask 1), decided by the template:

- With `{% generation %}` marks: exactly the characters inside the marks.
- Without marks, by prefixes: an assistant turn is everything from the end of the generation
  prompt to the place where the next turn's rendering begins, or the end of the text for the last
  turn. So the turn's header (the generation prompt) is given; think block, content, tool calls,
  the stop token and what the template puts after it (a newline, for Qwen) are trained.

How the prefixes are cut. The start is the length of `render(messages before the turn, generation
prompt)`, which must be a prefix of the whole text: what is trained is what is asked at inference.
A template may render the last assistant turn otherwise than an earlier one (Qwen3 puts an empty
think block into it), so no prefix ends after an assistant turn. Instead the end of an earlier
turn is counted from the following turns' end backwards: with a placeholder in the turn's place,
all that follows it is the stop text and the next turns, and the length of these is the same in
the text. Where that does not hold, `render(messages up to and with the turn)` is tried, and taken
only if it is a prefix of the text and ends in a stop.

Then characters become tokens. A row whose span begins or ends inside a token is rejected: no rule
would be right for such a token. Every row is checked: the bytes of its trained tokens are the
bytes of its spans. A row without a trained token is rejected, so a zero mask never passes in
silence.

Left to others: reading rows (`records`), cutting and packing (`prepare`, `packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ds_sft.data.records import Conversation, Message, Rejected
from ds_sft.data.template import ChatTemplate, Span, Tools, Unrenderable
from ds_sft.data.tokenizer import token_bytes
from ds_sft.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A code point that Unicode sets aside for use inside a program, so that no row contains it.
_PLACEHOLDER = "\ufdd2"

TrainOn = Literal["assistant", "last-assistant", "all"]
Thinking = Literal["keep", "strip-history", "drop-empty"]
OnRewrite = Literal["split", "refuse"]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One conversation as the model reads it."""

    tokens: npt.NDArray[np.int32]
    """Token ids [n]."""
    assistant_mask: npt.NDArray[np.uint8]
    """1 where the token is trained [n]."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    text: str
    data: bytes
    spans: list[Span]


class ChatEncoder:
    """Renders and tokenizes conversations with one template and one tokenizer."""

    def __init__(
        self,
        template: ChatTemplate,
        backend: Tokenizer,
        *,
        train_on: TrainOn = "assistant",
        thinking: Thinking = "keep",
        on_rewrite: OnRewrite = "split",
    ) -> None:
        """Raises DataError for a template that cannot tell what to train."""
        self.template = template
        self.train_on = train_on
        self.thinking = thinking
        self.on_rewrite = on_rewrite
        self._backend = backend
        self._bytes = token_bytes(backend)
        self._lengths = np.array([len(piece) for piece in self._bytes or []], np.int64)
        added = backend.get_added_tokens_decoder().values()
        self._special = tuple(token.content for token in added if token.special)
        self._stop = self._probe_stop()

    @property
    def trains_stop(self) -> bool:
        """Whether the text after an assistant's content, up to its stop token, is trained."""
        if not self.template.has_marks:
            return True
        text, spans = self.template.render_marked(_probe_chat(), None)
        content_end = text.index(_PLACEHOLDER) + 1
        stop_end = content_end + len(self._stop.rstrip())
        return any(start <= content_end and stop_end <= end for start, end in spans)

    def encode(self, rows: Sequence[Conversation]) -> list[list[Document] | Rejected]:
        """One result per row, in order. Many rows at once are faster than one by one."""
        results: list[list[Document] | Rejected | None] = [None] * len(rows)
        rendered: list[tuple[int, _Rendered]] = []
        for number, row in enumerate(rows):
            try:
                rendered.append((number, self._render(row)))
            except Unrenderable as error:
                results[number] = Rejected(reason=error.reason, detail=error.detail)
        documents = self._tokenize([item for _, item in rendered])
        for (number, _), document in zip(rendered, documents, strict=True):
            results[number] = document if isinstance(document, Rejected) else [document]
        return [result for result in results if result is not None]

    def _render(self, row: Conversation) -> _Rendered:
        if self.template.has_marks:
            text, spans = self.template.render_marked(row.messages, row.tools)
        else:
            text, spans = self._prefix_spans(row.messages, row.tools)
        try:
            return _Rendered(text, text.encode("utf-8"), spans)
        except UnicodeEncodeError as error:
            raise Unrenderable("lone_surrogate", f"character {error.start} of the text") from None

    # --- spans of a template without marks ---

    def _probe_stop(self) -> str:
        """What the template puts after an assistant's content, learned from a probe."""
        name = self.template.name
        try:
            text = self.template.render(_probe_chat(), None)
            asked = self.template.render(_probe_chat()[:1], None)
            prompt = self.template.render(_probe_chat()[:1], None, add_generation_prompt=True)
            marked = self.template.render_marked(_probe_chat(), None)[1]
        except Unrenderable as error:
            raise DataError(
                f"chat template {name} cannot render a user and an assistant turn "
                f"({error.detail}): choose another --chat-template"
            ) from None
        if self.template.has_marks:
            if not marked:
                raise DataError(
                    f"chat template {name} marks nothing of an assistant turn: put the turn's "
                    "content and stop token inside {% generation %}"
                )
            return text.partition(_PLACEHOLDER)[2]
        stop = text.partition(_PLACEHOLDER)[2]
        if not (prompt.startswith(asked) and len(prompt) > len(asked) and stop.strip()):
            missing = "stop token" if prompt != asked else "generation prompt"
            raise DataError(
                f"chat template {name} has no {{% generation %}} marks and no {missing}, so what "
                "to train cannot be told: put marks into it, or choose another --chat-template"
            )
        return stop

    def _prefix_spans(self, messages: list[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The text and the span of each assistant turn. Raises Unrenderable."""
        turns = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
        for turn, following in pairwise(turns):
            if following == turn + 1:
                detail = f"messages {turn} and {following}: needs a template with marks"
                raise Unrenderable("consecutive_assistant_turns", detail)
        text = self.template.render(messages, tools)
        if not turns:
            return text, []
        prompts = [
            self.template.render(messages[:turn], tools, add_generation_prompt=True)
            for turn in turns
        ]
        for turn, prompt in zip(turns, prompts, strict=True):
            if not text.startswith(prompt):
                detail = f"what stands before message {turn} changes as the conversation goes on"
                raise Unrenderable("prefix_rewritten", detail)
        starts = [len(prompt) for prompt in prompts]
        limits = [*starts[1:], len(text)]
        ends = self._turn_ends(messages, tools, turns, starts, limits, text)
        return text, list(zip(starts, ends, strict=True))

    def _turn_ends(
        self,
        messages: list[Message],
        tools: Tools,
        turns: list[int],
        starts: list[int],
        limits: list[int],
        text: str,
    ) -> list[int]:
        """Where each assistant turn ends in `text`; `limits` are the ends of the turns after it."""
        last_is_open = turns[-1] == len(messages) - 1
        inner = turns[:-1] if last_is_open else turns
        tails = self._tails(messages, tools, inner, last_is_open) if inner else []
        ends = []
        for turn, start, limit, tail in zip(inner, starts, limits, tails, strict=False):
            end = -1
            if tail is not None and text.endswith(tail, start, limit):
                end = limit - len(tail)
            if end <= start or not self._ends_in_stop(text, start, end):
                end = self._grown_end(messages[: turn + 1], tools, text)
            if not start < end <= limit or not self._ends_in_stop(text, start, end):
                raise Unrenderable("turn_end_unclear", f"the end of message {turn} cannot be told")
            ends.append(end)
        return [*ends, len(text)] if last_is_open else ends

    def _tails(
        self, messages: list[Message], tools: Tools, inner: list[int], prompt: bool
    ) -> list[str | None]:
        """What follows each inner assistant turn after its stop, up to the next one's content.

        One rendering with a placeholder in place of every inner turn gives them all.
        """
        replaced = list(messages[:-1] if prompt else messages)
        for turn in inner:
            replaced[turn] = {"role": "assistant", "content": _PLACEHOLDER}
        try:
            probe = self.template.render(replaced, tools, add_generation_prompt=prompt)
        except Unrenderable:
            return [None] * len(inner)
        pieces = probe.split(_PLACEHOLDER)[1:]
        if len(pieces) != len(inner):
            return [None] * len(inner)
        return [
            piece.removeprefix(self._stop) if piece.startswith(self._stop) else None
            for piece in pieces
        ]

    def _grown_end(self, messages: list[Message], tools: Tools, text: str) -> int:
        grown = self.template.render(messages, tools)
        return len(grown) if text.startswith(grown) else -1

    def _ends_in_stop(self, text: str, start: int, end: int) -> bool:
        turn = text[start:end]
        return turn.endswith(self._stop) or turn.rstrip().endswith(self._special)

    # --- characters to tokens ---

    def _tokenize(self, rows: list[_Rendered]) -> list[Document | Rejected]:
        if self._bytes is None:
            return [self._tokenize_by_offsets(row) for row in rows]
        table = self._bytes
        encodings = self._backend.encode_batch_fast(
            [row.text for row in rows], add_special_tokens=False
        )
        results: list[Document | Rejected] = []
        for row, encoding in zip(rows, encodings, strict=True):
            ids = encoding.ids
            if b"".join([table[number] for number in ids]) == row.data:
                results.append(self._mask_by_bytes(row, np.array(ids, np.int32)))
            else:
                results.append(self._tokenize_by_offsets(row))
        return results

    def _mask_by_bytes(self, row: _Rendered, tokens: npt.NDArray[np.int32]) -> Document | Rejected:
        """Mask a row whose tokens' bytes are its text: then lengths alone place every token."""
        bounds = np.concatenate([[0], np.cumsum(self._lengths[tokens])])
        edges = np.array(_byte_edges(row), np.int64)
        places = np.searchsorted(bounds, edges)
        if not np.array_equal(bounds[places], edges):
            return _inside_token(row, int(np.flatnonzero(bounds[places] != edges)[0]))
        return _document(tokens, places.reshape(-1, 2).tolist())

    def _tokenize_by_offsets(self, row: _Rendered) -> Document | Rejected:
        """Mask a row by the tokenizer's own offsets, and check it by decoding.

        For tokenizers that are not byte-level, and for text that the tokenizer normalizes.
        """
        encoding = self._backend.encode(row.text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        tokens = np.array(encoding.ids, np.int32)
        places = []
        for index, (start, end) in enumerate(row.spans):
            first = int(np.searchsorted(offsets[:, 1], start, side="right"))
            last = int(np.searchsorted(offsets[:, 0], end, side="left"))
            if first < last and (offsets[first, 0] < start or offsets[last - 1, 1] > end):
                return _inside_token(row, 2 * index)
            before, upto = self._decode(tokens[:first]), self._decode(tokens[:last])
            span = row.text[start:end]
            if not upto.startswith(before) or upto[len(before) :] not in self._spellings(span):
                detail = f"{upto[len(before) :]!r} is not {span!r}"
                return Rejected(reason="decoded_tokens_differ", detail=detail[:120])
            places.append([first, last])
        return _document(tokens, places)

    def _decode(self, tokens: npt.NDArray[np.int32]) -> str:
        text: str = self._backend.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def _spellings(self, span: str) -> tuple[str, ...]:
        """The span, and what the tokenizer makes of it: composed accents, a space it puts first."""
        again = self._backend.encode(span, add_special_tokens=False).ids
        own = self._decode(np.array(again, np.int32))
        return (span, own) if self._bytes is not None else (span, own, " " + own)


def _document(
    tokens: npt.NDArray[np.int32], places: Sequence[Sequence[int]]
) -> Document | Rejected:
    mask = np.zeros(len(tokens), np.uint8)
    for first, last in places:
        mask[first:last] = 1
    if not mask[1:].any():
        return Rejected(reason="no_trained_token", detail="nothing of the row is trained")
    return Document(tokens, mask)


def _byte_edges(row: _Rendered) -> list[int]:
    """Starts and ends of the spans, flat, in bytes."""
    edges = [edge for span in row.spans for edge in span]
    if len(row.data) == len(row.text):
        return edges
    pieces = (row.text[a:b] for a, b in pairwise([0, *edges]))
    return list(accumulate(len(piece.encode("utf-8")) for piece in pieces))


def _inside_token(row: _Rendered, edge: int) -> Rejected:
    span = row.spans[edge // 2]
    place = span[edge % 2]
    around = row.text[max(0, place - 12) : place] + "|" + row.text[place : place + 12]
    detail = f"a token crosses the edge of the trained text at {around!r}"
    return Rejected(reason="edge_inside_token", detail=detail)


def _probe_chat() -> list[Message]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
