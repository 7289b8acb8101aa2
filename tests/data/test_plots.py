"""Plots of a packed data set: their numbers are the data's, and matplotlib stays optional."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ds_sft.data import inspect
from ds_sft.data.inspect import InspectFlags
from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.plots import trained_shares, used_tokens
from ds_sft.errors import ConfigError, DataError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with PackedWriter(tmp_path / "data", max_seq_len=8) as writer:
        writer.add_pack(np.arange(1, 7), np.array([1, 1, 0, 0, 0, 1]), [2, 4])
        writer.add_pack(np.arange(1, 9), np.array([0] * 6 + [1] * 2), [8])
        writer.commit({})
    return tmp_path / "data"


def test_shares_and_used_tokens_are_those_of_the_documents(data: Path) -> None:
    opened = PackedDataset.open(data)
    assert trained_shares(opened).tolist() == [1.0, 0.25, 0.25]
    assert used_tokens(opened).tolist() == [6.0, 8.0]


def test_three_pictures_are_drawn(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    inspect.run(InspectFlags(data=data, plot=tmp_path / "new" / "plots"))
    drawn = sorted((tmp_path / "new" / "plots").iterdir())
    assert [path.name for path in drawn] == [
        "document-lengths.png",
        "pack-fill.png",
        "trained-share.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    said = capsys.readouterr().out
    assert all(f"wrote {path}" in said for path in drawn)


def test_without_matplotlib_the_extra_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib: pip install 'ds-sft\[plot\]'"):
        inspect.run(InspectFlags(data=data, plot=tmp_path / "plots"))
    assert not (tmp_path / "plots").exists()


def test_a_place_that_cannot_be_written_is_one_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"--plot .* cannot be written: "):
        inspect.run(InspectFlags(data=data, plot=tmp_path / "file"))


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "empty", max_seq_len=8) as writer:
        writer.commit({})
    with pytest.raises(DataError, match="holds no document to draw"):
        inspect.run(InspectFlags(data=tmp_path / "empty", plot=tmp_path / "plots"))
