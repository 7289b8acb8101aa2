"""Rows of sources -> documents, on all cores, in order, in bounded memory.

Rows go to the workers in chunks as raw bytes; a worker parses, renders, tokenizes, masks and cuts,
and sends back flat arrays. Results come out in the order of the input whatever the number of
workers, and at most a few chunks per worker are in flight. A worker ends when its parent is gone.

Left to others: the chunks (`chunks`), what a document is (`rows`, `chat`), placing documents into
packs (`packs`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_sft.data.chat import ChatEncoder, Document
from ds_sft.data.chunks import Chunk, chunks
from ds_sft.data.draws import Take
from ds_sft.data.encoded import Dropped, Encoded, Repeated
from ds_sft.data.packing import Overlong, pieces
from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.rows import ANY, Reading, parse_row
from ds_sft.data.template import ChatTemplate
from ds_sft.data.thinking import Thinking
from ds_sft.data.tokenizer import load_backend
from ds_sft.data.turns import OnRewrite, TrainOn
from ds_sft.errors import DataError

CHUNKS_PER_WORKER = 3
SMALL_INPUT_BYTES = 2**20
"""Below this, starting workers takes longer than the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to turn lines into documents."""

    tokenizer_file: Path
    """The stored tokenizer.json."""
    template: str
    """Text of the chat template."""
    template_name: str
    """Its name in messages."""
    special_tokens: Mapping[str, str]
    """The tokenizer's special tokens by name, for the template."""
    max_seq_len: int
    """Tokens in a pack."""
    overlong: Overlong
    """What happens to a longer document; `raise` leaves it whole for the caller to report."""
    reading: Reading = ANY
    """How rows are read."""
    train_on: TrainOn = "assistant"
    """Which turns are trained."""
    thinking: Thinking = "keep"
    """What becomes of reasoning."""
    on_rewrite: OnRewrite = "split"
    """What becomes of a conversation that the template renders otherwise as it goes on."""


def build_encoder(job: Job) -> ChatEncoder:
    """Raises DataError if the template is unusable."""
    template = ChatTemplate(job.template, job.special_tokens, job.template_name)
    return ChatEncoder(
        template,
        load_backend(job.tokenizer_file),
        train_on=job.train_on,
        thinking=job.thinking,
        on_rewrite=job.on_rewrite,
    )


def encode_files(
    takes: Sequence[Take], job: Job, encoder: ChatEncoder, num_workers: int
) -> Iterator[Encoded]:
    """Encode every row taken, in order. Raises DataError for a file that cannot be read.

    Short input is encoded with `encoder` in this process, whatever `num_workers` says.
    """
    total = sum(take.source.text_size for take in takes)
    if num_workers == 1 or total < SMALL_INPUT_BYTES:
        for chunk in chunks(takes):
            yield _encode(chunk, job, encoder)
        return
    yield from _encode_in_parallel(takes, job, encoder, num_workers)


def _encode(chunk: Chunk, job: Job, encoder: ChatEncoder) -> Encoded:
    rejected: list[tuple[int, Rejected]] = []
    conversations: list[Conversation] = []
    numbers: list[int] = []
    shapes: dict[str, int] = {}
    for number, row in zip(chunk.places, chunk.raw_rows(), strict=True):
        parsed = parse_row(row, job.reading)
        shapes[parsed.shape] = shapes.get(parsed.shape, 0) + 1
        if isinstance(parsed.result, Rejected):
            rejected.append((number, parsed.result))
        else:
            conversations.append(parsed.result)
            numbers.append(number)
    cut = _Cut(job)
    hashes: list[tuple[int, bytes]] = []
    num_tokens = 0
    repeated = Repeated()
    for number, result in zip(numbers, encoder.encode(conversations), strict=True):
        if isinstance(result, Rejected):
            rejected.append((number, result))
            continue
        hashes.append((number, _hash(result)))
        lengths = [len(document.tokens) for document in result]
        if len(lengths) > 1:
            repeated += Repeated(1, len(lengths), sum(lengths) - max(lengths))
        for document in result:
            num_tokens += len(document.tokens)
            cut.add(number, document)
    return Encoded(
        source=chunk.source,
        num_bytes=chunk.num_bytes,
        num_accepted=len(hashes),
        places=cut.places,
        full_lengths=cut.full_lengths,
        kept_lengths=[len(kept) for kept in cut.tokens[1:]],
        tokens=np.concatenate(cut.tokens),
        assistant_mask=np.concatenate(cut.masks),
        dropped=cut.dropped,
        rejected=sorted(rejected, key=lambda item: item[0]),
        num_tokens=num_tokens,
        hashes=hashes,
        shapes=shapes,
        repeated=repeated,
    )


def _hash(documents: Sequence[Document]) -> bytes:
    """What tells one row from another: the tokens of its documents, and which are trained."""
    digest = blake2b(digest_size=16)
    for document in documents:
        digest.update(len(document.tokens).to_bytes(8, "little"))
        digest.update(document.tokens.tobytes())
        digest.update(document.assistant_mask.tobytes())
    return digest.digest()


class _Cut:
    """Collects the documents of a chunk, each cut to the length of a pack."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.places: list[int] = []
        self.full_lengths: list[int] = []
        self.tokens: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
        self.masks: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        self.dropped: list[Dropped] = []

    def add(self, place: int, document: Document) -> None:
        length = len(document.tokens)
        if length <= self._job.max_seq_len or self._job.overlong == "raise":
            self._take(place, length, document.tokens, document.assistant_mask)
            return
        cuts = pieces(length, self._job.max_seq_len, self._job.overlong)
        if not cuts:
            self._take(place, length, document.tokens[:0], document.assistant_mask[:0])
        for piece in cuts:
            tokens, mask = document.tokens[piece], document.assistant_mask[piece]
            full = length if len(cuts) == 1 else len(tokens)
            if piece.start > 0:
                # In a pack the last token of the document before it would learn to predict it.
                mask = np.concatenate([np.zeros(1, np.uint8), mask[1:]])
            if mask[1:].any():
                self._take(place, full, tokens, mask)
            else:
                dropped = Dropped(place=place, num_tokens=full, reason="no_trained_token_after_cut")
                self.dropped.append(dropped)

    def _take(
        self,
        place: int,
        full: int,
        tokens: npt.NDArray[np.int32],
        mask: npt.NDArray[np.uint8],
    ) -> None:
        self.places.append(place)
        self.full_lengths.append(full)
        self.tokens.append(tokens)
        self.masks.append(mask)


# --- worker processes ---

_worker: tuple[Job, ChatEncoder] | None = None
_thread: ThreadPoolExecutor | None = None


def start_method() -> str:
    """`fork` where it is safe, since a forked worker has the tokenizer at once; else `spawn`.

    A fork copies locks but no threads: torch and any Python thread forbid it.
    """
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    return "fork" if alone and sys.platform == "linux" else "spawn"


def _start_worker(job: Job) -> None:
    """Runs once in each worker; Ctrl-C is the parent's to handle."""
    global _worker, _thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process per core: threads inside would only get into each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A forked worker has the parent's.
    _worker = _worker or (job, build_encoder(job))
    # A thread has a part of malloc's memory to itself. In the main one, which start-up has left in
    # fragments, the tokenizer takes half as long again (2.3 s for 1.5 s, glibc).
    _thread = ThreadPoolExecutor(1)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _worker is not None
    assert _thread is not None
    return _thread.submit(_encode, chunk, *_worker).result()


def _encode_in_parallel(
    takes: Sequence[Take], job: Job, encoder: ChatEncoder, num_workers: int
) -> Iterator[Encoded]:
    global _worker
    _worker = (job, encoder)
    context = get_context(start_method())
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(job,))
    pending: deque[Future[Any]] = deque()
    try:
        for chunk in chunks(takes):
            pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) >= CHUNKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker process of {num_workers} died, most likely for want of memory: "
            "use fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _worker = None
