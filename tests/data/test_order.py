from pathlib import Path

import numpy as np
import pytest

from ds_sft.data.levanter_order import LevanterOrder
from ds_sft.data.order import pack_order, run_order
from ds_sft.errors import ConfigError, DataError


def test_sequential_is_every_pack_once_in_order() -> None:
    assert pack_order("sequential", 5, seed=1).tolist() == [0, 1, 2, 3, 4]


def test_shuffle_is_the_first_trainers_permutation() -> None:
    expected = np.arange(1000)
    np.random.default_rng(42).shuffle(expected)
    assert np.array_equal(pack_order("shuffle", 1000, seed=42), expected)


def test_shuffle_is_frozen_by_its_numbers() -> None:
    # Written down, so that a change of numpy's generator shows: resumed runs need this order.
    assert pack_order("shuffle", 8, seed=42).tolist() == [3, 4, 2, 7, 6, 1, 5, 0]


def test_another_seed_is_another_order() -> None:
    assert not np.array_equal(pack_order("shuffle", 100, 1), pack_order("shuffle", 100, 2))


def test_a_file_may_repeat_and_omit_packs(tmp_path: Path) -> None:
    path = tmp_path / "order.npy"
    np.save(path, np.array([2, 2, 0], dtype=np.int32))
    packs = pack_order(str(path), 4, seed=0)
    assert packs.tolist() == [2, 2, 0]
    assert packs.dtype == np.int64


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros(0, np.int64), "is empty"),
        (np.zeros((2, 2), np.int64), "one row of integer pack indices"),
        (np.array([0.0, 1.0]), "holds float64"),
        (np.array([0, 9]), "names packs 0 to 9, but the data set holds 0 to 3"),
        (np.array([-1, 0]), "names packs -1 to 0"),
    ],
)
def test_a_file_that_is_no_order_is_refused(tmp_path: Path, array: np.ndarray, said: str) -> None:
    path = tmp_path / "order.npy"
    np.save(path, array)
    with pytest.raises(DataError, match=said):
        pack_order(str(path), 4, seed=0)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        pack_order(str(tmp_path / "none.npy"), 4, seed=0)
    (tmp_path / "text.npy").write_text("0 1 2")
    with pytest.raises(DataError, match="cannot be read"):
        pack_order(str(tmp_path / "text.npy"), 4, seed=0)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="use sequential, shuffle, levanter-blocks"):
        pack_order("random", 4, seed=0)


@pytest.mark.parametrize(
    ("order", "era_length"),
    [("levanter-blocks", None), ("levanter-shuffle", 0), ("levanter-era", 7)],
)
def test_levanters_orders_hold_the_whole_run(order: str, era_length: int | None) -> None:
    given = 7 if order == "levanter-era" else 0
    packs = run_order(order, 20, 500, 42, block_size=64, era_length=given)
    assert list(packs) == list(LevanterOrder(20, 500, 42, 64, era_length))
    assert len(packs) == 500


def test_other_orders_hold_every_pack_once() -> None:
    for order in ("sequential", "shuffle"):
        packs = run_order(order, 20, 500, 42, block_size=64, era_length=0)
        assert packs == pack_order(order, 20, 42).tolist()
