"""Levanter's order of the packs, against orders that Levanter itself produced.

golden/data_order.json: the real data sets of the September 2025 version, from position 0.
golden/data_order_far.json: a later 1.2 development version of the same classes, at positions across
blocks, epochs and the borders of eras.
"""

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from harness import GOLDEN

from ds_sft.data.levanter_order import LevanterOrder, feistel

NAME = re.compile(
    r"Mixture 1 comp, (?:shuffle=(False|True)|era shuffle=(\d+)).* block (\d+), data_seed (\d+)"
)
GOLDEN_CASES = [
    case
    for case in json.loads((GOLDEN / "data_order.json").read_text())["cases"]
    if case["name"].startswith("Mixture")
]
FAR_CASES = json.loads((GOLDEN / "data_order_far.json").read_text())["cases"]


def golden_order(case: dict[str, Any], num_positions: int | None = None) -> LevanterOrder:
    match = NAME.match(case["name"])
    assert match is not None
    shuffle, era, block, seed = match.groups()
    era_length = {"False": None, "True": 0}[shuffle] if shuffle else int(era)
    return LevanterOrder(
        case["n_packs"], num_positions or len(case["order"]), int(seed), int(block), era_length
    )


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda c: f"{c['n_packs']} {c['name'][16:45]}")
def test_the_order_is_levanters(case: dict[str, Any]) -> None:
    assert len(GOLDEN_CASES) == 15
    order = golden_order(case)
    assert list(order) == case["order"]
    assert np.asarray(order).tolist() == case["order"]
    assert order[:5] == case["order"][:5]


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN_CASES if len(c) > 3], ids=lambda c: c["n_packs"]
)
def test_packs_of_a_block_come_as_often_as_levanters(case: dict[str, Any]) -> None:
    times = Counter(Counter(np.asarray(golden_order(case, 2048)).tolist()).values())
    times[0] = case["n_packs"] - sum(times.values())
    want = {int(k): v for k, v in case["block0_multiplicities{times:how many packs}"].items()}
    assert +times == want


@pytest.mark.parametrize("case", FAR_CASES, ids=lambda c: f"{c['num_packs']}-{c['era_length']}")
def test_far_positions_are_levanters_too(case: dict[str, Any]) -> None:
    positions = case["positions"]
    order = LevanterOrder(
        case["num_packs"], positions[-1] + 1, case["seed"], case["block_size"], case["era_length"]
    )
    assert [order[at] for at in positions] == case["packs"]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    """So a run may be extended, and be resumed at any step."""
    short, long = (np.asarray(LevanterOrder(50, n, 7, 64, 20)) for n in (333, 5000))
    assert short.tolist() == long[:333].tolist()
    assert len(long) == 5000


def test_positions_outside_the_run_are_an_error() -> None:
    order = LevanterOrder(5, 10, 0, 4, None)
    for at in (-1, 10):
        with pytest.raises(IndexError):
            order[at]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 1000, 1024, 1025])
def test_feistel_is_a_permutation(length: int) -> None:
    assert sorted(feistel(length, seed=3).tolist()) == list(range(length))
