"""The order in which packs are trained: which `--order` means what.

Owns `sequential`, `shuffle` and order files: one array of pack indices, walked around and around.
Invariant: a pure function of its arguments, the same on every rank and in every resumed run. An
order file may name a pack twice or never. Leaves Levanter's own orders, which have no such array,
to `levanter_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_sft.data.levanter_order import LevanterOrder
from ds_sft.errors import ConfigError, DataError

LEVANTER_ORDERS = ("levanter-blocks", "levanter-shuffle", "levanter-era")


def run_order(
    order: str,
    num_packs: int,
    num_positions: int,
    seed: int,
    *,
    block_size: int,
    era_length: int,
) -> Sequence[int]:
    """The packs of a run's positions; a run that is longer than the sequence walks it again.

    Raises ConfigError or DataError for an order that cannot be used.
    """
    if order not in LEVANTER_ORDERS:
        packs: list[int] = pack_order(order, num_packs, seed).tolist()
        return packs
    eras = {"levanter-blocks": None, "levanter-shuffle": 0, "levanter-era": era_length}[order]
    return LevanterOrder(num_packs, num_positions, seed, block_size, eras)


def pack_order(order: str, num_packs: int, seed: int) -> npt.NDArray[np.int64]:
    """Pack indices, int64 [n]. Raises ConfigError or DataError for an order that cannot be used.

    `shuffle` is one permutation by numpy's `default_rng(seed)`, the same in every epoch.
    """
    if order == "sequential":
        return np.arange(num_packs, dtype=np.int64)
    if order == "shuffle":
        if seed < 0:
            raise ConfigError(f"--data-seed {seed} is negative: use 0 or more")
        packs = np.arange(num_packs, dtype=np.int64)
        np.random.default_rng(seed).shuffle(packs)
        return packs
    if not order.endswith(".npy"):
        known = ", ".join(("sequential", "shuffle", *LEVANTER_ORDERS))
        raise ConfigError(f"--order {order!r} is not known: use {known} or a .npy file")
    return _order_file(Path(order), num_packs)


def _order_file(path: Path, num_packs: int) -> npt.NDArray[np.int64]:
    try:
        packs = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"--order {path} does not exist") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"--order {path} cannot be read as a .npy file: {error}") from None
    if packs.ndim != 1 or not np.issubdtype(packs.dtype, np.integer):
        raise DataError(
            f"--order {path} holds {packs.dtype} {list(packs.shape)}: "
            "it must be one row of integer pack indices"
        )
    if packs.size == 0:
        raise DataError(f"--order {path} is empty: it must name at least one pack")
    low, high = int(packs.min()), int(packs.max())
    if low < 0 or high >= num_packs:
        raise DataError(
            f"--order {path} names packs {low} to {high}, but the data set holds 0 to "
            f"{num_packs - 1}: write it for this data set"
        )
    return np.asarray(packs, dtype=np.int64)
