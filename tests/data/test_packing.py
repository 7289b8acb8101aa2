"""Next-fit packs are Levanter's own, best-fit packs are full; no document is lost or repeated."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data.packing import NextFit, best_fit, pack_documents, pieces
from ds_sft.errors import DataError

CASES = json.loads((Path(__file__).parents[1] / "golden" / "packing.json").read_text())["cases"]
DOCUMENTS = st.lists(st.integers(0, 40), max_size=80)


def test_all_golden_cases_are_here() -> None:
    assert len(CASES) == 15


@pytest.mark.parametrize("overlong", ["left", "right", "raise"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_packs_are_levanters(case: dict, overlong: str) -> None:
    def packs() -> list[list[int]]:
        return list(
            pack_documents(
                case["doc_lengths"],
                case["max_seq_len"],
                max_docs=case["max_segments_per_example"],
                overlong=overlong,
            )
        )

    expected = case[overlong]
    if "error" in expected:
        number = int(expected["error"].split()[2])
        length = case["doc_lengths"][number]
        with pytest.raises(DataError, match=f"document {number} has {length} tokens, more than"):
            packs()
    else:
        assert packs() == expected["packs"]


@pytest.mark.parametrize("overlong", ["left", "right"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_tokens_kept_are_levanters(case: dict, overlong: str) -> None:
    expected = case[overlong]
    lengths, size = case["doc_lengths"], case["max_seq_len"]
    used = [
        [part.stop - part.start for doc in pack for part in pieces(lengths[doc], size, overlong)]
        for pack in expected["packs"]
    ]
    assert used == expected["used_lengths"]
    for pack, example in zip(expected["packs"], expected.get("examples") or [], strict=False):
        tokens: list[int] = []
        for doc in pack:
            for part in pieces(lengths[doc], size, overlong):
                tokens += case["doc_tokens"][doc][part]
        assert example["tokens"] == tokens + [0] * (size - len(tokens))


@given(DOCUMENTS, st.integers(1, 30), st.integers(1, 6))
def test_every_document_is_packed_once_in_order_and_fits(
    lengths: list[int], size: int, max_docs: int
) -> None:
    packs = list(pack_documents(lengths, size, max_docs=max_docs))
    assert [doc for pack in packs for doc in pack] == list(range(len(lengths)))
    for pack in packs:
        assert 1 <= len(pack) <= max_docs
        if any(lengths[doc] > size for doc in pack):
            assert len(pack) == 1
        else:
            assert sum(lengths[doc] for doc in pack) <= size


@given(DOCUMENTS, st.integers(1, 30), st.integers(1, 6))
def test_dropping_leaves_out_exactly_the_overlong_documents(
    lengths: list[int], size: int, max_docs: int
) -> None:
    packs = list(pack_documents(lengths, size, max_docs=max_docs, overlong="drop"))
    kept = [doc for pack in packs for doc in pack]
    assert kept == [doc for doc, length in enumerate(lengths) if length <= size]
    ends = [doc for doc, length in enumerate(lengths) if length > size]
    for pack in packs:
        assert not any(pack[0] < doc < pack[-1] for doc in ends), "a dropped one ends the pack"


@given(DOCUMENTS, st.integers(1, 30), st.integers(1, 6))
def test_a_pack_ends_only_when_the_next_document_cannot_join(
    lengths: list[int], size: int, max_docs: int
) -> None:
    packs = list(pack_documents(lengths, size, max_docs=max_docs))
    for pack, following in itertools.pairwise(packs):
        joined = sum(lengths[doc] for doc in pack) + lengths[following[0]]
        assert joined > size or len(pack) == max_docs


@given(st.integers(0, 100), st.integers(1, 60))
def test_left_keeps_the_first_and_right_the_last_tokens(length: int, size: int) -> None:
    document = np.arange(length)
    (left,), (right,) = pieces(length, size, "left"), pieces(length, size, "right")
    assert document[left].tolist() == document[:size].tolist()
    assert document[right].tolist() == document[max(0, length - size) :].tolist()
    assert len(pieces(length, size, "drop")) == (length <= size)


def test_the_65th_document_opens_a_pack_by_default() -> None:
    fit = NextFit(max_seq_len=1000)
    starts = [index for index in range(130) if fit.starts_new_pack(1)]
    assert starts == [64, 128]


@given(st.integers(0, 100), st.integers(1, 60))
def test_split_keeps_every_token_in_order_in_full_pieces(length: int, size: int) -> None:
    parts = pieces(length, size, "split")
    document = list(range(length))
    assert [token for part in parts for token in document[part]] == document
    assert all(part.stop - part.start == size for part in parts[:-1])
    assert parts[-1].stop - parts[-1].start <= size
    assert length == 0 or parts[-1].start < parts[-1].stop


@given(st.integers(0, 100), st.integers(1, 60))
def test_a_document_that_fits_is_one_piece_whatever_happens_to_longer_ones(
    length: int, size: int
) -> None:
    for overlong in ("left", "right", "drop", "split", "raise"):
        if length <= size:
            assert pieces(length, size, overlong) == [slice(0, length)]
    assert pieces(size + 1, size, "drop") == []
    assert pieces(size + 1, size, "raise") == [slice(0, size + 1)]


def best_fit_one_by_one(lengths: list[int], size: int) -> list[list[int]]:
    """Best-fit decreasing as it is defined, without any structure."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [(room, n) for n, room in enumerate(rooms) if room >= lengths[document]]
        if not fitting:
            packs.append([])
            rooms.append(size)
        pack = min(fitting)[1] if fitting else len(packs) - 1
        packs[pack].append(document)
        rooms[pack] -= lengths[document]
    return sorted(sorted(pack) for pack in packs)


SIZES_AND_LENGTHS = st.integers(1, 200).flatmap(
    lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=120))
)


@given(SIZES_AND_LENGTHS)
@settings(max_examples=200, deadline=None)
def test_best_fit_is_what_placing_one_by_one_gives(case: tuple[int, list[int]]) -> None:
    size, lengths = case
    packs = [pack.tolist() for pack in best_fit(np.array(lengths, np.int32), size)]
    assert packs == best_fit_one_by_one(lengths, size)


@given(SIZES_AND_LENGTHS)
def test_best_fit_places_every_document_once_and_orders_packs_by_their_first(
    case: tuple[int, list[int]],
) -> None:
    size, lengths = case
    packs = [pack.tolist() for pack in best_fit(np.array(lengths, np.int64), size)]
    assert sorted(doc for pack in packs for doc in pack) == list(range(len(lengths)))
    assert all(sum(lengths[doc] for doc in pack) <= size for pack in packs)
    assert all(pack == sorted(pack) for pack in packs)
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)


def lognormal_lengths(number: int, size: int) -> npt.NDArray[np.int64]:
    drawn = np.random.default_rng(0).lognormal(7.0, 1.0, number)
    return np.clip(drawn.astype(np.int64), 1, size)


def test_best_fit_leaves_less_than_one_percent_empty_on_lengths_like_those_of_chats() -> None:
    lengths = lognormal_lengths(100_000, 32768)
    packs = best_fit(lengths, 32768)
    assert lengths.sum() / (len(packs) * 32768) > 0.999
    next_fit = sum(1 for _ in pack_documents(lengths.tolist(), 32768))
    assert len(packs) < 0.98 * next_fit


def test_a_million_lengths_are_packed_in_seconds() -> None:
    lengths = lognormal_lengths(1_000_000, 32768)
    started = time.process_time()
    packs = best_fit(lengths, 32768)
    assert time.process_time() - started < 2.5
    assert lengths.sum() / (len(packs) * 32768) >= 0.99


def test_best_fit_at_the_longest_pack_length_takes_no_longer() -> None:
    lengths = np.random.default_rng(1).integers(1, 2**24, 5_000)
    started = time.process_time()
    packs = best_fit(lengths, 2**24)
    assert time.process_time() - started < 1.0
    assert sum(len(pack) for pack in packs) == 5_000
