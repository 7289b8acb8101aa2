"""Collation against the arrays that Levanter itself fed to its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds_sft.data.collate import IGNORE, collate
from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_qwen3" / "packed_data.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def data(golden: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    out = tmp_path_factory.mktemp("packed") / "data"
    offsets = golden["pack_offsets"]
    with PackedWriter(out, max_seq_len=64) as writer:
        for pack in range(len(golden["tokens"])):
            lengths = golden["doc_lens"][offsets[pack] : offsets[pack + 1]].tolist()
            used = sum(lengths)
            writer.add_pack(
                golden["tokens"][pack][:used], golden["assistant_mask"][pack][:used], lengths
            )
        writer.commit({})
    return PackedDataset.open(out)


def test_the_writer_reproduces_levanters_arrays(data: PackedDataset, golden) -> None:
    for name in ("tokens", "assistant_mask", "doc_lens", "pack_offsets", "assistant_counts"):
        assert np.array_equal(getattr(data, name), golden[name]), name


def test_targets_are_the_next_tokens_where_levanters_loss_mask_is_one(
    data: PackedDataset, golden
) -> None:
    packs = list(range(data.num_packs))
    batch = collate(data, packs, num_active=len(packs))
    following = np.roll(golden["tokens"], -1, axis=1)
    expected = np.where(golden["loss_mask"] == 1, following, IGNORE)
    assert np.array_equal(batch.targets, expected.reshape(-1))


def test_the_stored_counts_are_what_the_loss_counts(data: PackedDataset) -> None:
    for pack in range(data.num_packs):
        batch = collate(data, [pack], num_active=1)
        assert (batch.targets != IGNORE).sum() == data.assistant_counts[pack]


def test_segments_are_levanters_segment_ids(data: PackedDataset, golden) -> None:
    packs = [3, 27, 3, 12]
    batch = collate(data, packs, num_active=4)
    rows = np.concatenate([golden["segment_ids"][pack] for pack in packs])
    row_of = np.repeat(np.arange(len(packs)), 64)
    changes = np.flatnonzero((np.diff(rows) != 0) | (np.diff(row_of) != 0)) + 1
    assert batch.cu_seq_lens.tolist() == [0, *changes.tolist(), len(rows)]
    assert batch.cu_seq_lens.dtype == np.int32
    assert sum(batch.segment_lengths) == 4 * 64
    assert batch.max_length == max(batch.segment_lengths)
    assert type(batch.max_length) is int


def test_positions_run_over_the_whole_pack(data: PackedDataset) -> None:
    batch = collate(data, [0, 1], num_active=2)
    assert batch.position_ids.tolist() == [[*range(64), *range(64)]]
    assert batch.input_ids.shape == (1, 128)
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.targets.dtype == np.int64


def test_idle_slots_keep_their_tokens_and_lose_their_targets(data: PackedDataset) -> None:
    full = collate(data, [0, 1, 3], num_active=3)
    part = collate(data, [0, 1, 3], num_active=1)
    assert np.array_equal(part.input_ids, full.input_ids)
    assert np.array_equal(part.targets[:64], full.targets[:64])
    assert (part.targets[64:] == IGNORE).all()
    assert (collate(data, [0], num_active=0).targets == IGNORE).all()


def test_no_row_predicts_the_first_token_of_the_next_row(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "data", max_seq_len=3) as writer:
        for _ in range(2):
            writer.add_pack(np.array([5, 6, 7]), np.ones(3), [3])
        writer.commit({})
    batch = collate(PackedDataset.open(tmp_path / "data"), [0, 1], num_active=2)
    assert batch.targets.tolist() == [6, 7, IGNORE, 6, 7, IGNORE]


def test_an_empty_document_is_no_segment(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "data", max_seq_len=4) as writer:
        writer.add_pack(np.array([5, 6, 7]), np.array([0, 1, 1]), [0, 2, 0, 1])
        writer.commit({})
    batch = collate(PackedDataset.open(tmp_path / "data"), [0], num_active=1)
    assert batch.segment_lengths == [2, 1, 1]
    assert batch.targets.tolist() == [6, 7, IGNORE, IGNORE]
