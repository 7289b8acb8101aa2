"""A data set that was changed in place is found before a step is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from ds_sft.data.packed import PackedDataset
from ds_sft.engine import proofs
from ds_sft.errors import PreflightError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [mine]

    monkeypatch.setattr(proofs.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(proofs.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(proofs.dist, "all_gather_object", gather)
    monkeypatch.setattr(proofs, "say", print)


@pytest.mark.usefixtures("alone")
def test_arrays_that_are_not_the_manifests_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = harness.write_golden_data(tmp_path / "data")
    proofs.prove_data(PackedDataset.open(path))
    assert "[init] the data is as it was prepared" in capsys.readouterr().out
    tokens = np.load(path / "tokens.npy")
    np.save(path / "tokens.npy", tokens[:, ::-1])
    with pytest.raises(PreflightError, match=r"tokens\.npy is not the file that prepare wrote"):
        proofs.prove_data(PackedDataset.open(path))


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_the_ranks_share_the_files_among_them(tmp_path: Path, ranks: int) -> None:
    from ds_sft.data.packed import check_hashes

    data = PackedDataset.open(harness.write_golden_data(tmp_path / "data"))
    shares = [check_hashes(data, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(check_hashes(data))
    assert len(check_hashes(data)) >= 5
