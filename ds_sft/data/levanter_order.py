"""Levanter's order of the packs: a mixture, shuffled block by block, over a shuffled data set.

Owns the rules (stanford-crfm/levanter 9263f81e, September 2025: `data/mixture.py`,
`data/permutation.py`, `data/_prp.py`, and how `LMMixtureDatasetConfig.train_set` joins them and
deals out keys) for one data set of packs. Invariants: position i of a run has the same pack
whatever the length of the run, the ranks and the start; numpy only. Leaves JAX's random numbers to
`threefry`.

Position i lies in block b = i // block_size. The block holds the child indices b * block_size ...
(b + 1) * block_size - 1 in an order drawn for that block, and a child index c means pack c modulo
the number of packs, then through the data set's own shuffle. So no epoch is like another, and an
epoch does not hold every pack once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ds_sft.data import threefry

Ints = npt.NDArray[np.int64]

_ROUNDS = 5
_MULTIPLIER = np.uint64(2654435761)
_CHUNK_POSITIONS = 1 << 20


class LevanterOrder(Sequence[int]):
    """The packs of a run's positions, computed by the block when they are asked for.

    `era_length` shuffles the data set under the mixture: None not at all (`shuffle: false`), 0 as a
    whole (`shuffle: true`), else in eras of so many packs (`shuffle: N`).
    """

    def __init__(
        self, num_packs: int, num_positions: int, seed: int, block_size: int,
        era_length: int | None,
    ) -> None:  # fmt: skip
        assert num_packs > 0
        assert block_size > 0
        self.num_positions, self.block_size = num_positions, block_size
        mix_key, shuffle_key = threefry.split(threefry.key_of(seed)[None])
        self._mix_key = mix_key[0]
        self._child = _shuffled(num_packs, era_length, shuffle_key)
        # The ranks walk forward, and a batch may lie across two blocks.
        self._block = lru_cache(maxsize=2)(lambda block: self._blocks(block, block + 1).tolist())

    def __len__(self) -> int:
        return self.num_positions

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self.num_positions))]
        if not 0 <= at < self.num_positions:
            raise IndexError(at)
        block, offset = divmod(at, self.block_size)
        return int(self._block(block)[offset])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All positions at once, int64 [len]."""
        num_blocks = -(-self.num_positions // self.block_size)
        stride = max(1, _CHUNK_POSITIONS // self.block_size)
        parts = [
            self._blocks(first, min(first + stride, num_blocks))
            for first in range(0, num_blocks, stride)
        ]
        packs = np.concatenate([np.zeros(0, dtype=np.int64), *parts])[: self.num_positions]
        return packs if dtype is None else packs.astype(dtype)

    def _blocks(self, first: int, stop: int) -> Ints:
        """The packs of whole blocks, int64 [(stop - first) * block_size]."""
        numbers = np.arange(first, stop, dtype=np.int64)
        keys = threefry.fold_in(self._mix_key, numbers)
        child = threefry.permutation(keys, self.block_size) + numbers[:, None] * self.block_size
        packs: Ints = self._child[child.reshape(-1) % len(self._child)]
        return packs


def _shuffled(num_packs: int, era_length: int | None, shuffle_key: threefry.Words) -> Ints:
    """Pack of every child index below the number of packs; the last era may be shorter."""
    if era_length is None:
        return np.arange(num_packs, dtype=np.int64)
    key = threefry.split(shuffle_key)[1]
    if era_length == 0:
        return feistel(num_packs, int(threefry.integer_of_30_bits(key)[0]))
    starts = np.arange(0, num_packs, era_length, dtype=np.int64)
    seeds = threefry.integer_of_30_bits(threefry.fold_in(key[0], np.arange(len(starts))))
    return np.concatenate(
        [
            start + feistel(min(era_length, num_packs - start), seed)
            for start, seed in zip(starts.tolist(), seeds.tolist(), strict=True)
        ]
    )


def feistel(length: int, seed: int) -> Ints:
    """Levanter's permutation of 0 ... length - 1: a Feistel network, walked until it is in range.

    A single element stays where it is; Levanter refuses that length.
    """
    if length == 1:
        return np.zeros(1, dtype=np.int64)
    width = (length - 1).bit_length()
    right_bits = np.uint64(width - width // 2)
    mask = (np.uint64(1) << right_bits) - np.uint64(1)
    rng = np.random.Generator(np.random.PCG64(seed))
    keys = rng.integers(0, 1 << int(right_bits), size=_ROUNDS, dtype=np.uint64)

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> right_bits, x & mask
        for key in keys:
            left, right = right, left ^ (((right & mask) * _MULTIPLIER + key) & mask)
        return (left << right_bits) | right

    out = network(np.arange(length, dtype=np.uint64))
    outside = np.flatnonzero(out >= length)
    while len(outside):
        out[outside] = network(out[outside])
        outside = outside[out[outside] >= length]
    return out.astype(np.int64)
