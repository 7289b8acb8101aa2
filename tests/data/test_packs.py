"""Documents reach their packs whole, once and in a known order, for every kind of packing."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data.claim import LOCK
from ds_sft.data.encoded import Encoded
from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.packing import Packing, best_fit, pack_documents, pieces
from ds_sft.data.packs import Histogram, Packs
from ds_sft.data.report import Counts
from ds_sft.errors import DataError

SIZE = 24
KINDS = get_args(Packing)


def document(number: int, length: int) -> np.ndarray:
    """Tokens that say which document and which place they are."""
    return (number * 1000 + np.arange(length) + 1).astype(np.int32)


def mask_of(tokens: np.ndarray) -> np.ndarray:
    return (tokens % 3 == 0).astype(np.uint8)


def chunk(
    numbers: Sequence[int], lengths: Sequence[int], overlong: Literal["left", "drop"]
) -> Encoded:
    """What a worker sends back for these documents."""
    full = [lengths[number] for number in numbers]
    kept = [
        np.concatenate([document(n, lengths[n])[part] for part in parts])
        if (parts := pieces(lengths[n], SIZE, overlong))
        else np.empty(0, np.int32)
        for n in numbers
    ]
    tokens = np.concatenate([np.empty(0, np.int32), *kept])
    return Encoded(
        source=0,
        num_bytes=0,
        num_accepted=len(numbers),
        places=list(numbers),
        full_lengths=full,
        kept_lengths=[len(part) for part in kept],
        tokens=tokens,
        assistant_mask=mask_of(tokens),
        dropped=[],
        rejected=[],
    )


def prepare(
    out: Path,
    lengths: Sequence[int],
    packing: Packing,
    *,
    chunk_rows: int = 7,
    overlong: Literal["left", "drop"] = "left",
    max_docs: int = 64,
) -> tuple[PackedDataset, Counts]:
    counts = Counts(SIZE)
    with PackedWriter(out, SIZE, replace=True) as writer:
        packs = Packs(writer, counts, packing=packing, max_docs=max_docs)
        for start in range(0, len(lengths), chunk_rows):
            numbers = range(start, min(start + chunk_rows, len(lengths)))
            packs.add(chunk(numbers, lengths, overlong), "chats.jsonl")
        packs.flush()
        left = [path.name for path in writer.partial.iterdir() if path.suffix != ".npy"]
        assert left == [LOCK], "documents wait in files without a name"
        writer.commit({"packing": packs.manifest()})
    return PackedDataset.open(out), counts


def documents_of(data: PackedDataset) -> list[list[list[int]]]:
    """The tokens of every document of every pack; checks the mask and the padding on the way."""
    found = []
    for pack in range(data.num_packs):
        ends = np.cumsum([0, *data.doc_lengths(pack)])
        row = np.asarray(data.tokens[pack])
        assert np.array_equal(data.assistant_mask[pack][: ends[-1]], mask_of(row[: ends[-1]]))
        assert not row[ends[-1] :].any()
        assert not data.assistant_mask[pack][ends[-1] :].any()
        found.append([row[a:b].tolist() for a, b in itertools.pairwise(ends)])
    return found


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(lengths=LENGTHS, packing=st.sampled_from(KINDS), overlong=st.sampled_from(["left", "drop"]))
@settings(deadline=None, max_examples=60)
def test_every_document_is_in_one_pack_whole_or_counted_as_dropped(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    packing: Packing,
    overlong: Literal["left", "drop"],
) -> None:
    data, counts = prepare(
        tmp_path_factory.getbasetemp() / "data", lengths, packing, overlong=overlong
    )
    expected = [
        document(n, length)[:SIZE].tolist()
        for n, length in enumerate(lengths)
        if length <= SIZE or overlong == "left"
    ]
    packs = documents_of(data)
    assert sorted(doc for pack in packs for doc in pack) == expected
    assert all(pack == sorted(pack) for pack in packs), "within a pack in the order of the input"
    assert packs == sorted(packs), "packs in the order of their first documents"
    assert counts.tokens_in == sum(lengths)
    assert counts.tokens == sum(map(len, expected)) == int(data.doc_lens.sum())
    assert counts.tokens_in == counts.tokens + counts.tokens_cut + counts.tokens_dropped
    assert counts.trained_tokens == int(data.assistant_mask.sum())
    assert counts.packs == data.num_packs == len(packs)
    histograms = data.manifest["packing"]
    assert counts.documents == len(expected) == sum(histograms["document_lengths"]["counts"])
    assert data.num_packs == sum(histograms["documents_per_pack"]["counts"])


@pytest.mark.parametrize("packing", KINDS)
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_how_documents_come_in_chunks_changes_no_byte(
    tmp_path: Path, packing: Packing, chunk_rows: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, SIZE + 5, 90).tolist()
    one, _ = prepare(tmp_path / "one", lengths, packing)
    other, _ = prepare(tmp_path / "other", lengths, packing, chunk_rows=chunk_rows)
    assert one.manifest_sha256 == other.manifest_sha256


def test_the_packs_are_those_that_packing_tells(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, SIZE + 1, 50).tolist()
    told = {
        "next-fit": list(pack_documents(lengths, SIZE, max_docs=3)),
        "best-fit": [pack.tolist() for pack in best_fit(np.array(lengths), SIZE)],
        "none": [[number] for number in range(50)],
    }
    for packing in KINDS:
        data, _ = prepare(tmp_path / packing, lengths, packing, max_docs=3)
        numbers = [[doc[0] // 1000 for doc in pack] for pack in documents_of(data)]
        assert numbers == told[packing]


@pytest.mark.parametrize("packing", KINDS)
def test_without_a_writer_the_same_is_counted(tmp_path: Path, packing: Packing) -> None:
    lengths = np.random.default_rng(2).integers(1, SIZE + 9, 70).tolist()
    _, written = prepare(tmp_path / "data", lengths, packing)
    counts = Counts(SIZE)
    packs = Packs(None, counts, packing=packing)
    packs.add(chunk(range(70), lengths, "left"), "chats.jsonl")
    packs.flush()
    assert counts == written


def test_the_manifest_holds_fill_and_histograms(tmp_path: Path) -> None:
    data, counts = prepare(tmp_path / "data", [1, 2, 3, 4, 24, 24, 9], "best-fit")
    assert data.manifest["packing"] == {
        "kind": "best-fit",
        "max_docs_per_pack": 0,
        "fill": round(67 / (3 * 24), 6),
        "document_lengths": {"bounds": [1, 2, 4, 8, 16, 32], "counts": [1, 2, 1, 1, 2]},
        "documents_per_pack": {"bounds": [1, 2, 4, 8], "counts": [2, 0, 1]},
    }
    assert counts.documents == 7


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_a_histogram_counts_each_value_between_its_bounds(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    told = histogram.manifest()
    expected = np.histogram(values, [*told["bounds"], np.inf])[0] if values else [0]
    assert [*told["counts"], 0] == list(expected)


def test_no_document_at_all_is_no_pack(tmp_path: Path) -> None:
    for packing in KINDS:
        data, counts = prepare(tmp_path / packing, [30, 31], packing, overlong="drop")
        assert data.num_packs == counts.packs == 0
        assert counts.tokens_dropped == 61


@pytest.mark.parametrize("packing", KINDS)
def test_a_document_that_may_not_be_cut_is_named(tmp_path: Path, packing: Packing) -> None:
    long = Encoded(
        source=0,
        num_bytes=0,
        num_accepted=1,
        places=[12],
        full_lengths=[25],
        kept_lengths=[25],
        tokens=document(0, 25),
        assistant_mask=mask_of(document(0, 25)),
        dropped=[],
        rejected=[],
    )
    with PackedWriter(tmp_path / "data", SIZE) as writer:
        packs = Packs(writer, Counts(SIZE), packing=packing)
        with pytest.raises(DataError, match=r"chats\.jsonl:12 has 25 tokens, more than"):
            packs.add(long, "chats.jsonl")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A full disk, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("packing", KINDS)
def test_a_full_disk_leaves_nothing(tmp_path: Path, packing: Packing) -> None:
    with files_of_at_most(40_000), pytest.raises(OSError, match="File too large"):
        prepare(tmp_path / "data", [20] * 3000, packing)
    assert list(tmp_path.iterdir()) == []
