"""JAX's counter-based random numbers, in numpy: what Levanter's data order is drawn from.

Owns threefry2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the
way in which jax.random 0.5 to 0.7 turns it into keys, bits, permutations and integers
(`jax_threefry_partitionable`, 64-bit types off: JAX's defaults). Invariants: pure functions; many
keys at once, along the first axis; a key is two uint32. Leaves what is drawn to `levanter_order`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_CHUNK = 1 << 15  # words that stay in a core's cache over the twenty rounds
_LOW = np.uint64(0xFFFFFFFF)


def key_of(seed: int) -> Words:
    """`jax.random.PRNGKey(seed)`, uint32 [2], for a seed of 32 bits."""
    assert 0 <= seed < 2**32
    return np.array([0, seed], dtype=np.uint32)


def fold_in(key: Words, numbers: Ints) -> Words:
    """`jax.random.fold_in(key, n)` of every n, uint32 [len(numbers), 2]."""
    low = (numbers & 0xFFFFFFFF).astype(np.uint32)
    return np.stack(_cipher(key[None, :], np.zeros_like(low), low), axis=-1)


def split(keys: Words) -> tuple[Words, Words]:
    """`jax.random.split(key)` of keys [K, 2]: the two new keys of each, both uint32 [K, 2]."""
    zeros = np.zeros(len(keys), dtype=np.uint32)
    first, second = (np.stack(_cipher(keys, zeros, zeros + np.uint32(n)), -1) for n in (0, 1))
    return first, second


def bits(keys: Words, count: int) -> Words:
    """`jax.random.bits(key, (count,))` of keys [K, 2], uint32 [K, count]."""
    out = np.empty((len(keys), count), dtype=np.uint32)
    rows = max(1, _CHUNK // max(count, 1))
    for top in range(0, len(keys), rows):
        some = keys[top : top + rows]
        for start in range(0, count, _CHUNK):
            low = np.arange(start, min(start + _CHUNK, count), dtype=np.uint32)
            low = np.broadcast_to(low, (len(some), len(low)))
            high, mixed = _cipher(some[:, None, :], np.zeros_like(low), low)
            out[top : top + rows, start : start + _CHUNK] = high ^ mixed
    return out


def permutation(keys: Words, length: int) -> Ints:
    """`jax.random.permutation(key, length)` of keys [K, 2], int64 [K, length].

    As many stable sorts by random words as make equal words harmless.
    """
    order = np.tile(np.arange(length, dtype=np.int64), (len(keys), 1))
    for _ in range(math.ceil(3 * math.log(max(1, length)) / math.log(2**32 - 1))):
        keys, drawn = split(keys)
        # (word, place) as one number: a stable sort by the word, and several times faster.
        ranked = bits(drawn, length).astype(np.uint64) << np.uint64(32)
        ranked |= np.arange(length, dtype=np.uint64)
        ranked.sort(axis=1)
        order = np.take_along_axis(order, (ranked & _LOW).astype(np.int64), axis=1)
    return order


def integer_of_30_bits(keys: Words) -> Ints:
    """`jax.random.randint(key, (), 0, 2**30)` of keys [K, 2], int64 [K].

    For a power of two only the low bits of the second draw count.
    """
    _, second = split(keys)
    return bits(second, 1)[:, 0].astype(np.int64) & (2**30 - 1)


def _cipher(keys: Words, high: Words, low: Words) -> tuple[Words, Words]:
    """Threefry with 20 rounds on the counters (high, low); keys [..., 2] broadcast against them."""
    first, second = keys[..., 0], keys[..., 1]
    schedule = (first, second, first ^ second ^ _PARITY)
    x, y = high + first, low + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x += y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y ^= x
        x += schedule[(group + 1) % 3]
        y += schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
