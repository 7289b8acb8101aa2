"""JAX's numbers, against what jax 0.7.2 itself drew (golden/threefry.json)."""

import json
from typing import Any

import numpy as np
import pytest
from harness import GOLDEN

from ds_sft.data import threefry


@pytest.fixture(scope="module")
def jax() -> dict[str, Any]:
    return json.loads((GOLDEN / "threefry.json").read_text())


@pytest.fixture(scope="module")
def keys(jax: dict[str, Any]) -> np.ndarray:
    """Every key at once, so that a test also shows that keys do not touch each other."""
    return np.stack([threefry.key_of(seed) for seed in jax["seeds"]])


def test_keys_are_those_of_prngkey(jax: dict[str, Any], keys: np.ndarray) -> None:
    assert keys.tolist() == jax["keys"]


def test_split_gives_jaxs_two_keys(jax: dict[str, Any], keys: np.ndarray) -> None:
    first, second = threefry.split(keys)
    assert np.stack([first, second], axis=1).tolist() == jax["split"]


def test_fold_in_takes_any_number_of_32_bits(jax: dict[str, Any], keys: np.ndarray) -> None:
    numbers = np.array(jax["fold_in_numbers"], dtype=np.int64)
    assert [threefry.fold_in(key, numbers).tolist() for key in keys] == jax["fold_in"]


def test_bits_are_jaxs_in_short_and_long_arrays(jax: dict[str, Any], keys: np.ndarray) -> None:
    assert threefry.bits(keys, 9).tolist() == jax["bits"]
    assert threefry.bits(keys, 40_000)[:, -3:].tolist() == jax["bits_40000_tail"]


@pytest.mark.parametrize("length", [1, 2, 3, 10, 33])
def test_permutations_are_jaxs(jax: dict[str, Any], keys: np.ndarray, length: int) -> None:
    assert threefry.permutation(keys, length).tolist() == jax["permutation"][str(length)]


def test_a_long_permutation_takes_as_many_rounds_as_jaxs(
    jax: dict[str, Any], keys: np.ndarray
) -> None:
    got = threefry.permutation(keys, 70_000)
    assert got[:, :5].tolist() == jax["permutation_70000_head"]
    assert (np.sort(got, axis=1) == np.arange(70_000)).all()


def test_integers_of_30_bits_are_jaxs_randint(jax: dict[str, Any], keys: np.ndarray) -> None:
    assert threefry.integer_of_30_bits(keys).tolist() == jax["randint_30_bits"]
