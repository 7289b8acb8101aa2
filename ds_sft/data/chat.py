"""Conversations -> token ids and the assistant mask.

What is trained, and in how many samples, is told in characters by `turns`. Here characters become
tokens. A row whose trained text begins or ends inside a token is rejected: no rule would be right
for such a token. Every row is checked: the bytes of its trained tokens are the bytes of its spans.
A row without a trained token is rejected, so a zero mask never passes in silence.

Special tokens are those that the template writes, as at inference: nothing is added, so a BOS
stands once where the template writes one.

Left to others: reading rows (`records`), cutting and packing (`prepare`, `packing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.template import ChatTemplate, Unrenderable
from ds_sft.data.thinking import Thinking
from ds_sft.data.tokenizer import token_bytes
from ds_sft.data.turns import OnRewrite, Sample, TrainOn, Turns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_BYTES = 4 * 2**20
"""Text that the tokenizer gets at a time: what it gives back takes fifty times the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One sample as the model reads it."""

    tokens: npt.NDArray[np.int32]
    """Token ids [n]."""
    assistant_mask: npt.NDArray[np.uint8]
    """1 where the token is trained [n]."""


@dataclass(frozen=True, slots=True)
class _Row:
    sample: Sample
    data: bytes


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
        self._turns = Turns(template, train_on, thinking, on_rewrite)
        self._backend = backend
        self._bytes = token_bytes(backend)
        self._lengths = np.array([len(piece) for piece in self._bytes or []], np.int64)

    @property
    def warnings(self) -> list[str]:
        """What a person should know before training with this template, one sentence each."""
        return [*self._turns.warnings, *self._bos_warnings(), *self._thought_warnings()]

    def _bos_warnings(self) -> list[str]:
        """Whether a sample begins with the one BOS that the tokenizer puts before plain text."""
        begins = self._backend.encode("", add_special_tokens=True).ids[:1]
        if not begins:
            return []
        name = self._backend.id_to_token(begins[0])
        text = self.template.render([{"role": "user", "content": "?"}], None)
        start = self._backend.encode(text, add_special_tokens=False).ids[:2]
        count = next((place for place, token in enumerate(start) if token != begins[0]), 2)
        if count == 1:
            return []
        how = "writes no" if count == 0 else "writes more than one"
        return [
            f"chat template {self.template.name} {how} {name}, with which the tokenizer begins a "
            "text: samples are as the template writes them, as at inference"
        ]

    def _thought_warnings(self) -> list[str]:
        """Whether an answer without reasoning closes the prompt's think block inside a token."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        [result] = self.encode([Conversation(messages=turns, tools=None)])
        if not isinstance(result, Rejected) or result.reason != "edge_inside_token":
            return []
        way_out = (
            "--thinking drop-empty trains them as they are asked for with thinking off"
            if self._turns.no_thought
            else "train it on answers with reasoning, or choose another --chat-template"
        )
        return [
            f"chat template {self.template.name} begins an answer without reasoning inside a token "
            f"of its generation prompt: such answers are rejected (edge_inside_token); {way_out}"
        ]

    def encode(self, rows: Sequence[Conversation]) -> list[list[Document] | Rejected]:
        """The documents of each row, in order, or why it has none: all of a row's or nothing.

        Many rows at once are faster than one by one.
        """
        results: list[list[Document] | Rejected] = [[] for _ in rows]
        samples: list[tuple[int, _Row]] = []
        for number, row in enumerate(rows):
            try:
                samples += [(number, _as_bytes(sample)) for sample in self._turns.samples(row)]
            except Unrenderable as error:
                results[number] = Rejected(reason=error.reason, detail=error.detail)
        documents = self._tokenize([row for _, row in samples])
        for (number, _), document in zip(samples, documents, strict=True):
            result = results[number]
            if isinstance(document, Rejected):
                results[number] = document if isinstance(result, list) else result
            elif isinstance(result, list):
                result.append(document)
        return results

    def _tokenize(self, rows: list[_Row]) -> list[Document | Rejected]:
        if self._bytes is None:
            return [self._tokenize_by_offsets(row.sample) for row in rows]
        table = self._bytes
        results: list[Document | Rejected] = []
        for batch in _batches(rows):
            encodings = self._backend.encode_batch_fast(
                [row.sample.text for row in batch], add_special_tokens=False
            )
            for row, encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids
                if b"".join([table[number] for number in ids]) == row.data:
                    results.append(self._mask_by_bytes(row, np.array(ids, np.int32)))
                else:
                    results.append(self._tokenize_by_offsets(row.sample))
        return results

    def _mask_by_bytes(self, row: _Row, tokens: npt.NDArray[np.int32]) -> Document | Rejected:
        """Mask a row whose tokens' bytes are its text: then lengths alone place every token."""
        bounds = np.concatenate([[0], np.cumsum(self._lengths[tokens])])
        edges = np.array(_byte_edges(row), np.int64)
        places = np.searchsorted(bounds, edges)
        inside = bounds[places] != edges
        if inside.any():
            if row.sample.exact:
                return _inside_token(row.sample, int(np.flatnonzero(inside)[0]))
            places[1::2] -= inside[1::2]
        return _document(tokens, places.reshape(-1, 2).tolist(), row.sample)

    def _tokenize_by_offsets(self, sample: Sample) -> Document | Rejected:
        """Mask a row by the tokenizer's own offsets, and check it by decoding.

        For tokenizers that are not byte-level, and for text that the tokenizer normalizes.
        """
        encoding = self._backend.encode(sample.text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        tokens = np.array(encoding.ids, np.int32)
        if not sample.exact:
            starts = np.searchsorted(offsets[:, 0], [start for start, _ in sample.spans])
            ends = np.searchsorted(offsets[:, 1], [end for _, end in sample.spans], side="right")
            return _document(tokens, np.stack([starts, ends], 1).tolist(), sample)
        places = []
        for index, (start, end) in enumerate(sample.spans):
            first = int(np.searchsorted(offsets[:, 1], start, side="right"))
            last = int(np.searchsorted(offsets[:, 0], end, side="left"))
            if first < last and (offsets[first, 0] < start or offsets[last - 1, 1] > end):
                return _inside_token(sample, 2 * index)
            before, upto = self._decode(tokens[:first]), self._decode(tokens[:last])
            span = sample.text[start:end]
            if not upto.startswith(before) or upto[len(before) :] not in self._spellings(span):
                detail = f"{upto[len(before) :]!r} is not {span!r}"
                return Rejected(reason="decoded_tokens_differ", detail=detail[:120])
            places.append([first, last])
        return _document(tokens, places, sample)

    def _decode(self, tokens: npt.NDArray[np.int32]) -> str:
        text: str = self._backend.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def _spellings(self, span: str) -> tuple[str, ...]:
        """The span, and what the tokenizer makes of it: composed accents, a space it puts first."""
        again = self._backend.encode(span, add_special_tokens=False).ids
        own = self._decode(np.array(again, np.int32))
        return (span, own) if self._bytes is not None else (span, own, " " + own)


def _batches(rows: list[_Row]) -> Iterator[list[_Row]]:
    """The rows in pieces: a conversation of many turns may become a hundred times its size."""
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.data)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _as_bytes(sample: Sample) -> _Row:
    try:
        return _Row(sample, sample.text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise Unrenderable("lone_surrogate", f"character {error.start} of the text") from None


def _document(
    tokens: npt.NDArray[np.int32], places: Sequence[Sequence[int]], sample: Sample
) -> Document | Rejected:
    mask = np.zeros(len(tokens), np.uint8)
    for first, last in places:
        mask[first:last] = 1
    if not sample.exact:
        # In a pack the document before it would be trained to predict this one's first token.
        mask[:1] = 0
    if not mask[1:].any():
        return Rejected(reason="no_trained_token", detail="nothing of the row is trained")
    return Document(tokens, mask)


def _byte_edges(row: _Row) -> list[int]:
    """Starts and ends of the spans, flat, in bytes."""
    text = row.sample.text
    edges = [edge for span in row.sample.spans for edge in span]
    if len(row.data) == len(text):
        return edges
    pieces = (text[a:b] for a, b in pairwise([0, *edges]))
    return list(accumulate(len(piece.encode("utf-8")) for piece in pieces))


def _inside_token(sample: Sample, edge: int) -> Rejected:
    span = sample.spans[edge // 2]
    place = span[edge % 2]
    around = sample.text[max(0, place - 12) : place] + "|" + sample.text[place : place + 12]
    detail = f"a token crosses the edge of the trained text at {around!r}"
    return Rejected(reason="edge_inside_token", detail=detail)
