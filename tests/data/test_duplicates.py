"""A row that came before is found, whatever the order and the size; a repeat is no duplicate."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data.duplicates import Duplicates, HashTable
from ds_sft.data.encoded import Encoded


def encoded(hashes: list[int], lengths: list[list[int]] | None = None) -> Encoded:
    """A chunk of rows from place 1 on; row i has documents of `lengths[i]`, else one token."""
    documents = [
        (place, length)
        for place, row in enumerate(lengths or [[1]] * len(hashes), 1)
        for length in row
    ]
    number = sum(length for _, length in documents)
    return Encoded(
        source=0,
        num_bytes=0,
        num_accepted=len(hashes),
        places=[place for place, _ in documents],
        full_lengths=[length for _, length in documents],
        kept_lengths=[length for _, length in documents],
        tokens=np.arange(number, dtype=np.int32),
        assistant_mask=np.ones(number, np.uint8),
        dropped=[],
        rejected=[],
        hashes=[(place, bytes([value]) * 16) for place, value in enumerate(hashes, 1)],
    )


def test_a_later_row_is_dropped_with_all_its_documents() -> None:
    chunk = encoded([7, 8, 7, 9], [[2], [1, 3], [2, 1], [4]])
    kept, number = Duplicates(drop=True).sift(chunk, 0)
    assert number == 1
    assert kept.places == [1, 2, 2, 4]
    assert kept.tokens.tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12]
    assert [(gone.place, gone.num_tokens, gone.reason) for gone in kept.dropped] == [
        (3, 2, "duplicate"),
        (3, 1, "duplicate"),
    ]


def test_validation_rows_that_are_trained_too_are_counted_once_each() -> None:
    duplicates = Duplicates(drop=False)
    duplicates.sift(encoded([7, 7, 8, 9]), 0, validation=True)
    assert duplicates.num_leaked == 0
    for file in (1, 2):
        duplicates.sift(encoded([7, 5, 8, 5, 7]), file)
    assert duplicates.num_leaked == 2
    # Of the same file, since a fraction of it is set aside.
    duplicates.sift(encoded([1, 1, 9]), 0)
    assert duplicates.num_leaked == 3


def test_rows_that_are_dropped_are_not_trained() -> None:
    duplicates = Duplicates(drop=True)
    duplicates.sift(encoded([7, 8]), 0, validation=True)
    assert duplicates.sift(encoded([7, 5]), 1)[0].places == [2]
    assert duplicates.num_leaked == 0


def test_duplicates_are_counted_and_kept_unless_told_otherwise() -> None:
    chunk = encoded([7, 7])
    assert Duplicates(drop=False).sift(chunk, 0) == (chunk, 1)


def test_a_repeat_of_a_source_is_no_duplicate_but_its_duplicates_are() -> None:
    duplicates = Duplicates(drop=True)
    chunk = encoded([7, 8, 7])
    for _ in range(3):
        kept, number = duplicates.sift(chunk, 0)
        assert (kept.places, number) == ([1, 2], 1)
    assert duplicates.sift(encoded([7]), 1)[1] == 1


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.binary(min_size=16, max_size=16).filter(any), max_size=60))
def test_the_table_answers_as_a_dict_does(values: list[bytes]) -> None:
    table = HashTable(slots=4)
    reference: dict[bytes, int] = {}
    for number, value in enumerate([*values, *values]):
        assert table.first(value, number) == reference.setdefault(value, number)


def test_ten_thousand_rows_take_less_than_eighty_bytes_each() -> None:
    table = HashTable()
    values = np.random.default_rng(0).bytes(16 * 10_000)
    for number in range(10_000):
        table.first(values[16 * number : 16 * number + 16], number)
    assert sys.getsizeof(table._table) < 80 * 10_000
