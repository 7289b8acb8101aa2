"""`ds-sft inspect`: one pack, as a person reads it.

Trained text is green on a terminal and stands in [brackets] elsewhere; brackets of the text itself
stay as they are. Documents are separated by a line with their length and share of trained tokens. A
character whose bytes lie in tokens of both kinds is shown as U+FFFD on either side.

Left to others: whether the data set is whole (`ds-sft verify`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import tyro

from ds_sft.data.packed import Array, PackedDataset
from ds_sft.data.tokenizer import load_backend
from ds_sft.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectFlags:
    """Show one pack of a packed data set: what is trained, and where documents end."""

    data: tyro.conf.Positional[Path]
    """Directory of the packed data set."""
    pack: int = 0
    """Number of the pack, from 0."""
    ids: bool = False
    """Show token ids instead of text."""


def run(flags: InspectFlags) -> None:
    """Print the pack. Raises DataError for unusable data, ConfigError for a pack out of range."""
    from rich.console import Console
    from rich.text import Text

    data = PackedDataset.open(flags.data)
    if not 0 <= flags.pack < data.num_packs:
        raise ConfigError(
            f"--pack {flags.pack}: {flags.data} has packs 0 to {data.num_packs - 1}: choose one"
        )
    if not flags.ids and data.tokenizer_dir is None:
        raise DataError(f"{flags.data} holds no tokenizer to show text with: add --ids")
    console = Console(highlight=False, soft_wrap=True)
    for line in describe(data, flags.pack):
        console.print(line, markup=False)
    decode = _ids if flags.ids else _text_decoder(data)
    lengths = data.doc_lengths(flags.pack)
    end = 0
    for number, length in enumerate(lengths):
        start, end = end, end + length
        mask = np.asarray(data.assistant_mask[flags.pack, start:end])
        tokens = np.asarray(data.tokens[flags.pack, start:end])
        share = mask.mean() if length else 0.0
        heading = (
            f"document {number + 1} of {len(lengths)}: {length} tokens, {int(mask.sum())} trained "
            f"({share:.0%})"
        )
        console.rule(heading, align="left", characters="─" if console.is_terminal else "-")
        shown = Text()
        for trained, piece in _spans(tokens, mask):
            text = decode(piece)
            if console.is_terminal:
                shown.append(text, style="bold green" if trained else "dim")
            else:
                shown.append(f"[{text}]" if trained else text)
        console.print(shown)
    console.rule("padding", align="left", characters="─" if console.is_terminal else "-")
    console.print(f"{data.max_seq_len - end} tokens", markup=False)


def describe(data: PackedDataset, pack: int) -> list[str]:
    """What is known of the pack as a whole."""
    used = sum(data.doc_lengths(pack))
    return [
        f"{data.path}: pack {pack} of {data.num_packs}",
        f"{used} of {data.max_seq_len} tokens used ({used / data.max_seq_len:.1%}), "
        f"{int(data.assistant_counts[pack])} trained targets",
    ]


def _spans(tokens: Array, mask: Array) -> Iterator[tuple[bool, Array]]:
    """Runs of tokens of one kind, with whether they are trained."""
    place = 0
    for trained, run_of in groupby(mask.tolist()):
        length = len(list(run_of))
        yield bool(trained), tokens[place : place + length]
        place += length


def _ids(tokens: Array) -> str:
    return " ".join(str(token) for token in tokens.tolist()) + " "


def _text_decoder(data: PackedDataset) -> Callable[[Array], str]:
    assert data.tokenizer_dir is not None
    backend = load_backend(data.tokenizer_dir / "tokenizer.json")
    return lambda tokens: str(backend.decode(tokens.tolist(), skip_special_tokens=False))
