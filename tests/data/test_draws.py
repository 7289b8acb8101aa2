"""Draws are exact, from the seed alone; a validation row is never trained, in no repeat."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data.draws import Draw, Take, choose, plan
from ds_sft.data.inputs import Input
from ds_sft.data.sources import TextSource
from ds_sft.errors import DataError


def source(path: Path, rows: int) -> TextSource:
    path.write_bytes(b"".join(b"%d\n" % number for number in range(rows)))
    return TextSource(path)


def make(tmp_path: Path, *parts: tuple[list[int], int, float | None]) -> list[Input]:
    """Inputs of so many files with so many rows, repeated or drawn."""
    inputs = []
    tmp_path.mkdir(exist_ok=True)
    for number, (sizes, repeats, fraction) in enumerate(parts):
        files = [source(tmp_path / f"{number}-{i}", size) for i, size in enumerate(sizes)]
        inputs.append(
            Input(text=f"{number}", sources=list(files), repeats=repeats, fraction=fraction)
        )
    return inputs


def taken(takes: list[Take]) -> list[tuple[int, int]]:
    """Every row taken, in order, as file and number."""
    found = []
    for take in takes:
        for place, (_, row) in enumerate(take.source):
            if take.keep is None or take.takes(place):
                found.append((take.file, int(row or b"")))
    return found


def test_without_a_draw_every_row_is_taken_and_nothing_is_counted(tmp_path: Path) -> None:
    inputs = make(tmp_path, ([2, 1], 1, None), ([2], 2, None))
    train, validation = plan(inputs, make(tmp_path / "held", ([1], 1, None)), Draw())
    assert taken(train) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 0), (2, 1)]
    assert [take.keep for take in [*train, *validation]] == [None] * 5
    assert validation[0].file == 3


@pytest.mark.parametrize(("fraction", "number"), [(0.5, 50), (0.001, 1), (0.994, 99)])
def test_a_fraction_is_exact_over_all_files_of_an_input(
    tmp_path: Path, fraction: float, number: int
) -> None:
    train, _ = plan(make(tmp_path, ([30, 69, 1], 1, fraction)), [], Draw(seed=3))
    rows = taken(train)
    assert len(rows) == len(set(rows)) == number
    assert rows == sorted(rows)


def test_max_samples_takes_so_many_of_all_passes(tmp_path: Path) -> None:
    inputs = make(tmp_path, ([40], 3, None), ([20], 1, 0.5))
    train, validation = plan(inputs, make(tmp_path / "held", ([50], 1, None)), Draw(max_samples=65))
    assert len(taken(train)) == 65
    assert len(taken(validation)) == 6
    assert max(Counter(taken(train)).values()) <= 3
    train, _ = plan(inputs, [], Draw(max_samples=1000))
    assert len(taken(train)) == 130


def test_a_validation_row_is_trained_in_no_repeat(tmp_path: Path) -> None:
    inputs = make(tmp_path, ([50], 3, None), ([50], 1, None))
    train, validation = plan(inputs, [], Draw(validation_fraction=0.2))
    held_out = taken(validation)
    assert len(held_out) == len(set(held_out)) == 20
    assert not set(held_out) & set(taken(train))
    assert set(held_out) | set(taken(train)) == {
        (file, row) for file in (0, 1) for row in range(50)
    }
    assert {file for file, _ in held_out} == {0, 1}


@pytest.mark.parametrize("fractions", [(None, None), (0.5, 0.5), (None, 0.3)])
def test_a_file_named_twice_is_one_file_for_the_draw(
    tmp_path: Path, fractions: tuple[float | None, ...]
) -> None:
    files = [source(tmp_path / name, rows) for name, rows in (("a", 40), ("b", 10))]
    same = TextSource(Path(f"{tmp_path}/../{tmp_path.name}/a"))
    inputs = [
        Input(text="0", sources=[*files], fraction=fractions[0]),
        Input(text="1", sources=[same], fraction=fractions[1]),
    ]
    before = {row for file, row in taken(plan(inputs, [], Draw())[0]) if file != 1}
    train, validation = plan(inputs, [], Draw(validation_fraction=0.25))
    held, rest = taken(validation), taken(train)
    assert len(held) == len(set(held))
    assert {file for file, _ in held} <= {0, 1}
    assert not {row for file, row in held if file == 0} & {row for file, row in rest if file != 1}
    assert {row for file, row in [*held, *rest] if file != 1} == before
    if fractions == (None, None):
        assert len(held) == round(0.25 * 50)
        assert len(rest) + sum(2 if file == 0 else 1 for file, _ in held) == 90


def test_max_samples_takes_a_tenth_for_validation(tmp_path: Path) -> None:
    inputs = make(tmp_path, ([100], 1, None))
    draw = Draw(validation_fraction=0.5, max_samples=5)
    train, validation = plan(inputs, [], draw)
    assert (len(taken(train)), len(taken(validation))) == (5, 1)


def test_a_share_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--validation-fraction 0\.9 of 1 rows leaves none"):
        plan(make(tmp_path, ([1], 1, None)), [], Draw(validation_fraction=0.9))


def test_a_file_that_grows_after_it_was_counted_is_an_error(tmp_path: Path) -> None:
    inputs = make(tmp_path, ([10], 1, 0.5))
    (take,), _ = plan(inputs, [], Draw())
    with pytest.raises(DataError, match="had 10 rows and now has more than 10"):
        take.takes(10)
    with pytest.raises(DataError, match="had 10 rows and now has 9 rows: it is being written"):
        take.check_end(9)


def test_the_seed_decides_and_is_all_that_decides(tmp_path: Path) -> None:
    inputs = make(tmp_path, ([200], 2, 0.5))
    draws = [Draw(seed=seed, validation_fraction=0.1, max_samples=50) for seed in (0, 0, 1)]
    first, again, other = ([taken(part) for part in plan(inputs, [], draw)] for draw in draws)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_what_a_seed_draws_stays_the_same() -> None:
    assert np.flatnonzero(choose(20, 5, [0, 1, 2])).tolist() == [3, 4, 8, 14, 19]


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 300), wanted=st.integers(0, 300), seed=st.integers(0, 5))
def test_a_choice_has_the_number_asked_for(total: int, wanted: int, seed: int) -> None:
    keep = choose(total, wanted, [seed])
    assert len(keep) == total
    assert keep.sum() == min(total, wanted)


def test_every_row_is_as_likely_as_another() -> None:
    drawn = sum(choose(50, 10, [seed]).astype(np.int64) for seed in range(2000))
    assert abs(drawn - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)
