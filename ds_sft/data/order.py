"""The order in which packs are trained: one array of pack indices, walked around and around.

Owns `sequential`, `shuffle` and order files. Invariant: a pure function of its arguments, the same
on every rank and in every resumed run. An order file may name a pack twice or never: Levanter's
block shuffle does, and such an order is reproduced by writing it to a file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_sft.errors import ConfigError, DataError


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
        raise ConfigError(f"--order {order!r} is not known: use sequential, shuffle or a .npy file")
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
