"""Pictures of a packed data set: how long its documents are, how full its packs, what is trained.

Three PNG files, each one histogram with the median and the total in its title. matplotlib is
imported only when something is drawn; it is the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds_sft.data.packed import PackedDataset
from ds_sft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = npt.NDArray[np.float64]
COLOUR = "#3b6ea5"
BINS = 60


def draw(data: PackedDataset, directory: Path) -> list[Path]:
    """Write the plots and return their paths.

    Raises ConfigError without matplotlib or when `directory` cannot be written, DataError when
    there is nothing to draw.
    """
    if not np.any(data.doc_lens):
        raise DataError(f"{data.path} holds no document to draw: prepare more rows")
    lengths = np.asarray(data.doc_lens, np.float64)
    fill = used_tokens(data) / data.max_seq_len
    trained = trained_shares(data)
    figures = {
        "document-lengths.png": _histogram(
            lengths,
            _logarithmic(lengths),
            f"{len(lengths):,} documents, {lengths.sum():,.0f} tokens, "
            f"median {np.median(lengths):,.0f}, longest {lengths.max():,.0f}",
            ("tokens of a document", "documents"),
        ),
        "pack-fill.png": _histogram(
            fill,
            np.linspace(0, 1, BINS + 1),
            f"{len(fill):,} packs of {data.max_seq_len:,} tokens, fill {fill.mean():.2%}",
            ("share of a pack that holds documents", "packs"),
        ),
        "trained-share.png": _histogram(
            trained,
            np.linspace(0, 1, BINS + 1),
            f"{np.average(trained, weights=lengths):.1%} of all tokens trained, "
            f"median document {np.median(trained):.1%}",
            ("share of a document that is trained", "documents"),
        ),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(directory / name, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {directory} cannot be written: {error.strerror}") from None
    return [directory / name for name in figures]


def used_tokens(data: PackedDataset) -> Values:
    """Tokens of documents in each pack [num_packs]."""
    ends = np.concatenate([[0], np.cumsum(data.doc_lens, dtype=np.int64)])
    used: Values = np.diff(ends[data.pack_offsets]).astype(np.float64)
    return used


def trained_shares(data: PackedDataset) -> Values:
    """Share of each document's tokens that is trained [num_docs]; reads the masks pack by pack."""
    shares = []
    for pack in range(data.num_packs):
        ends = np.cumsum([0, *data.doc_lengths(pack)])
        before = np.concatenate([[0], np.cumsum(data.assistant_mask[pack], dtype=np.int64)])
        shares.append(np.diff(before[ends]) / np.maximum(np.diff(ends), 1))
    return np.concatenate(shares)


def _logarithmic(lengths: Values) -> Values:
    """Edges of bins over all lengths, equally wide on a logarithmic axis."""
    shortest = max(1.0, float(lengths.min()))
    return np.unique(np.geomspace(shortest, float(lengths.max()) + 1, BINS + 1).round())


def _histogram(values: Values, edges: Values, title: str, labels: tuple[str, str]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'ds-sft[plot]'") from None
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(values, bins=edges.tolist(), color=COLOUR, edgecolor="white", linewidth=0.3)
    if edges[-1] > 1:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
