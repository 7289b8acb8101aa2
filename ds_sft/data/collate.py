"""Packs -> one microbatch of numpy arrays, as the model reads it.

Levanter's rules, which this module owns (stanford-crfm/levanter, `MultiturnChatDataset` and
`LmExample.causal`, September 2025):

- Position i is trained to predict token i + 1 of its own row where that token is masked in. The
  first token of a row is never a target and the last position of a row never has one. The last
  token of a document predicts the first token of the next one in its pack, if that is masked in.
- Positions run 0..L-1 over the whole pack; documents are separated by attention segments alone.
- Padding is a segment of its own and attends to itself.

The batch dimension of what the model reads is always 1: B packs of L tokens lie in a row of B*L.
Idle slots (packs at index >= `num_active`) keep their tokens, so that every rank does the same
work, and have no target. Left to others: moving to a device, and which packs make a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_sft.data.packed import PackedDataset

IGNORE = -100
"""Value of a position without a target, as torch's cross entropy ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """One microbatch in host memory: B packs of L tokens in one row."""

    input_ids: npt.NDArray[np.int64]
    """Token ids [1, B*L]."""
    position_ids: npt.NDArray[np.int64]
    """0..L-1 for every pack, contiguous over its documents [1, B*L]."""
    targets: npt.NDArray[np.int64]
    """Token to predict at each position, -100 where there is none [B*L]."""
    segment_lengths: list[int]
    """Attention segments in tokens: each pack's documents, then its padding; they sum to B*L."""
    cu_seq_lens: npt.NDArray[np.int32]
    """Segment boundaries, 0 first and B*L last [len(segment_lengths) + 1]."""
    max_length: int
    """Longest segment in tokens."""


def collate(data: PackedDataset, packs: Sequence[int], num_active: int) -> HostBatch:
    """Gather `packs` into one row; those at index >= `num_active` get no target.

    Worked example, L = 4, one pack with documents of 2 and 1 tokens, mask 0 1 1 0:
    ids 5 6 7 0 -> targets 6 7 -100 -100, segment_lengths [2, 1, 1], cu_seq_lens [0, 2, 3, 4].
    """
    assert len(packs) > 0
    assert 0 <= num_active <= len(packs)
    length = data.max_seq_len
    ids = np.stack([data.tokens[pack] for pack in packs]).astype(np.int64)
    trained = np.stack([data.assistant_mask[pack] for pack in packs]) != 0
    targets = np.full_like(ids, IGNORE)
    targets[:, :-1] = np.where(trained[:, 1:], ids[:, 1:], IGNORE)
    targets[num_active:] = IGNORE
    segments = [segment for pack in packs for segment in _segments(data, pack)]
    return HostBatch(
        input_ids=ids.reshape(1, -1),
        position_ids=np.tile(np.arange(length, dtype=np.int64), len(packs)).reshape(1, -1),
        targets=targets.reshape(-1),
        segment_lengths=segments,
        cu_seq_lens=np.concatenate([[0], np.cumsum(segments)]).astype(np.int32),
        max_length=max(segments),
    )


def _segments(data: PackedDataset, pack: int) -> list[int]:
    """Document lengths, then the padding; empty documents are no segments."""
    lengths = [length for length in data.doc_lengths(pack) if length > 0]
    padding = data.max_seq_len - sum(lengths)
    return [*lengths, padding] if padding else lengths
