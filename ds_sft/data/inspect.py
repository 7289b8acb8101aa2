"""`ds-sft inspect`: a packed data set, as a person reads it.

One pack, one document, the documents that hold a text, the rows that were rejected, or plots.
Trained text is green on a terminal and stands in [brackets] elsewhere; brackets of the text itself
stay as they are. Documents are numbered from 0 in pack order. A character whose bytes lie in tokens
of both kinds is shown as U+FFFD on either side.

Left to others: whether the data set is whole (`ds-sft verify`), what is drawn (`plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro

from ds_sft.data.console import open_console
from ds_sft.data.packed import MANIFEST, Array, PackedDataset
from ds_sft.data.tokenizer import load_backend, token_bytes
from ds_sft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

AROUND = 60  # bytes that --search shows on either side of what it found


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectFlags:
    """Show what a packed data set holds: a pack (the default), a document, a search, plots."""

    data: tyro.conf.Positional[Path]
    """Directory of the packed data set."""
    pack: int = 0
    """Number of the pack, from 0."""
    document: int | None = None
    """Show this document alone; numbered from 0 in pack order, over the whole data set."""
    search: str = ""
    """Show the documents whose text contains this."""
    limit: int = 10
    """Stop --search after so many documents; 0: never."""
    rejected: bool = False
    """Show the rows that prepare rejected, by reason, with the first of each."""
    plot: Path | None = None
    """Draw lengths, fill and trained share into this directory."""
    ids: bool = False
    """Show token ids instead of text."""

    def __post_init__(self) -> None:
        views = {
            "--pack": self.pack != 0,
            "--document": self.document is not None,
            "--search": self.search != "",
            "--rejected": self.rejected,
            "--plot": self.plot is not None,
        }
        chosen = [name for name, given in views.items() if given]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} show different things: choose one of them")
        if self.limit < 0:
            raise ConfigError(f"--limit {self.limit}: must be 0 (no limit) or more")


def run(flags: InspectFlags) -> None:
    """The command. Raises DataError for unusable data, ConfigError for a number out of range."""
    data = PackedDataset.open(flags.data)
    console = open_console(needs_reader=True)
    if flags.plot is not None:
        from ds_sft.data.plots import draw

        for path in draw(data, flags.plot):
            console.print(f"wrote {path}", markup=False)
    elif flags.rejected:
        try:
            show_rejected(console, data)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(
                f"{data.path}/{MANIFEST} is not as prepare wrote it, so that its counts cannot be "
                "told: copy the data set again, or run `ds-sft prepare` again"
            ) from None
    elif flags.search:
        search(console, data, flags.search, flags.limit)
    elif flags.document is not None:
        show_document(console, data, flags.document, _decoder(data, flags.ids))
    else:
        show_pack(console, data, flags.pack, _decoder(data, flags.ids))


# --- packs and documents ---

Decode = Callable[[Array], str]


def show_pack(console: Console, data: PackedDataset, pack: int, decode: Decode) -> None:
    """Every document of one pack."""
    if not 0 <= pack < data.num_packs:
        raise ConfigError(
            f"--pack {pack}: {data.path} has packs 0 to {data.num_packs - 1}: choose one"
        )
    for line in describe(data, pack):
        console.print(line, markup=False)
    first, last = int(data.pack_offsets[pack]), int(data.pack_offsets[pack + 1])
    for number in range(first, last):
        tokens, mask = _document(data, number)
        heading = f"document {number - first + 1} of {last - first}: {_size(mask)}"
        _rule(console, heading)
        _show(console, tokens, mask, decode)
    _rule(console, "padding")
    console.print(f"{data.max_seq_len - sum(data.doc_lengths(pack))} tokens", markup=False)


def show_document(console: Console, data: PackedDataset, number: int, decode: Decode) -> None:
    """One document, wherever it is."""
    num_documents = len(data.doc_lens)
    if not 0 <= number < num_documents:
        raise ConfigError(
            f"--document {number}: {data.path} has documents 0 to {num_documents - 1}: choose one"
        )
    tokens, mask = _document(data, number)
    _rule(console, f"{_place(data, number)}: {_size(mask)}")
    _show(console, tokens, mask, decode)


def describe(data: PackedDataset, pack: int) -> list[str]:
    """What is known of the pack as a whole."""
    used = sum(data.doc_lengths(pack))
    return [
        f"{data.path}: pack {pack} of {data.num_packs}",
        f"{used} of {data.max_seq_len} tokens used ({used / data.max_seq_len:.1%}), "
        f"{int(data.assistant_counts[pack])} trained targets",
    ]


def _pack_of(data: PackedDataset, number: int) -> int:
    return int(np.searchsorted(data.pack_offsets, number, side="right")) - 1


def _document(data: PackedDataset, number: int) -> tuple[Array, Array]:
    """Tokens and mask of a document."""
    pack = _pack_of(data, number)
    start = int(data.doc_lens[int(data.pack_offsets[pack]) : number].sum())
    place = slice(start, start + int(data.doc_lens[number]))
    return np.asarray(data.tokens[pack, place]), np.asarray(data.assistant_mask[pack, place])


def _place(data: PackedDataset, number: int) -> str:
    pack = _pack_of(data, number)
    first, last = int(data.pack_offsets[pack]), int(data.pack_offsets[pack + 1])
    return f"document {number} ({number - first + 1} of {last - first} in pack {pack})"


def _size(mask: Array) -> str:
    share = mask.mean() if len(mask) else 0.0
    return f"{len(mask)} tokens, {int(mask.sum())} trained ({share:.0%})"


def _rule(console: Console, heading: str) -> None:
    console.rule(heading, align="left", characters="─" if console.is_terminal else "-")


def _show(console: Console, tokens: Array, mask: Array, decode: Decode) -> None:
    from rich.text import Text

    shown = Text()
    for trained, piece in _spans(tokens, mask):
        text = decode(piece)
        if console.is_terminal:
            shown.append(text, style="bold green" if trained else "dim")
        else:
            shown.append(f"[{text}]" if trained else text)
    console.print(shown)


def _spans(tokens: Array, mask: Array) -> Iterator[tuple[bool, Array]]:
    """Runs of tokens of one kind, with whether they are trained."""
    place = 0
    for trained, run_of in groupby(mask.tolist()):
        length = len(list(run_of))
        yield bool(trained), tokens[place : place + length]
        place += length


def _decoder(data: PackedDataset, ids: bool) -> Decode:
    if ids:
        return lambda tokens: " ".join(map(str, tokens.tolist())) + " "
    backend = _backend(data, "add --ids")
    return lambda tokens: str(backend.decode(tokens.tolist(), skip_special_tokens=False))


def _backend(data: PackedDataset, otherwise: str) -> Tokenizer:
    if data.tokenizer_dir is None:
        raise DataError(f"{data.path} holds no tokenizer to show text with: {otherwise}")
    return load_backend(data.tokenizer_dir / "tokenizer.json")


# --- search ---


def search(console: Console, data: PackedDataset, text: str, limit: int) -> None:
    """Print each document that contains `text`, as it is found, with the text around it."""
    from rich.text import Text

    wanted = text.encode("utf-8", "surrogateescape")
    found = looked_at = 0
    for number, spelled in _texts(data):
        looked_at = number + 1
        at = spelled.find(wanted)
        if at < 0:
            continue
        found += 1
        end = at + len(wanted)
        pieces = [spelled[max(0, at - AROUND) : at], wanted, spelled[end : end + AROUND]]
        before, hit, after = (p.decode("utf-8", "ignore").replace("\n", "⏎") for p in pieces)
        console.print(f"{_place(data, number)}: {_size(_document(data, number)[1])}", markup=False)
        console.print(Text(f"  {before}").append(hit, style="bold reverse").append(after))
        if found == limit:
            break
    total = len(data.doc_lens)
    looked = "all" if looked_at == total else f"the first {looked_at:,} of {total:,}"
    console.print(f"{found:,} found in {looked} documents; --document N shows one", markup=False)


def _texts(data: PackedDataset) -> Iterator[tuple[int, bytes]]:
    """Every document's text as UTF-8."""
    backend = _backend(data, "--search needs one")
    table = token_bytes(backend)
    number = 0
    for pack in range(data.num_packs):
        row = data.tokens[pack].tolist()
        if table is not None and not 0 <= min(row) <= max(row) < len(table):
            raise DataError(
                f"{data.path}: pack {pack} holds token ids that its tokenizer does not have "
                f"({len(table)}): run `ds-sft prepare` again"
            )
        end = 0
        for length in data.doc_lengths(pack):
            start, end = end, end + length
            if table is not None:
                yield number, b"".join([table[token] for token in row[start:end]])
            else:
                decoded = str(backend.decode(row[start:end], skip_special_tokens=False))
                yield number, decoded.encode("utf-8")
            number += 1


# --- rejected rows ---


def show_rejected(console: Console, data: PackedDataset) -> None:
    """What is in no pack, by reason. Raises DataError for a manifest without counts."""
    from rich.table import Table
    from rich.text import Text

    facts = data.manifest
    if "rejected" not in facts or "counts" not in facts:
        raise DataError(
            f"{data.path} does not say what was rejected (the first trainer wrote it): run "
            "`ds-sft prepare` again"
        )
    counts, first = facts["counts"], facts.get("first_rejected", {})
    console.print(
        f"{counts['rejected']:,} of {counts['rows']:,} rows rejected; of "
        f"{counts['tokens_in']:,} tokens {counts['tokens_dropped']:,} dropped and "
        f"{counts['tokens_cut']:,} cut off",
        markup=False,
    )
    rejected = Table("rows", "rejected as", "first", box=None, pad_edge=False)
    for reason, number in _by_number(facts["rejected"]):
        rejected.add_row(f"{number:,}", reason, Text(str(first.get(reason, ""))))
    dropped = Table("tokens", "dropped as", box=None, pad_edge=False)
    for reason, number in _by_number(facts.get("dropped_tokens", {})):
        dropped.add_row(f"{number:,}", reason)
    if not console.is_terminal:
        console.width = 10_000  # a reason stays on its line
    for table in (rejected, dropped):
        if table.row_count:
            console.print(table)


def _by_number(counted: dict[str, int]) -> list[tuple[str, int]]:
    """Most frequent first."""
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))
