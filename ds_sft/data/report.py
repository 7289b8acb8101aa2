"""What `prepare` counts, and how it says so.

Owns the counters of one preparation, the refusal of too many bad rows, and the lines printed.
Every row is counted once, as accepted or under the reason that it was rejected for; the tokens of
accepted rows are packed, cut off or dropped, and `check` proves it against the tokens that the
workers counted before they cut anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_sft.data.encoded import Encoded, Repeated
from ds_sft.data.rows import UNREADABLE
from ds_sft.data.shapes import READERS, UNKNOWN
from ds_sft.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

LOW_FILL = 0.8
_FULLER = {
    "next-fit": "change --max-seq-len or --max-docs-per-pack, or choose --packing best-fit",
    "best-fit": "change --max-seq-len",
    "none": "choose --packing next-fit or best-fit, or change --max-seq-len",
}
"""What makes packs fuller."""
ON_PURPOSE = ("over_max_chars", "auxiliary_record")
"""Reasons that are no fault of a row: --max-rejected does not count them."""


@dataclass(slots=True)
class Counts:
    """`tokens_in` = `tokens` + `tokens_cut` + `tokens_dropped`, over accepted rows."""

    max_seq_len: int
    rows: int = 0
    accepted: int = 0
    documents: int = 0
    tokens_in: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    packs: int = 0
    cut_documents: int = 0
    tokens_cut: int = 0
    dropped_documents: int = 0
    tokens_dropped: int = 0
    duplicates: int = 0
    repeated: Repeated = field(default_factory=Repeated)
    tokens_encoded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    first_rejected: dict[str, str] = field(default_factory=dict)

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    @property
    def fill(self) -> float:
        """Share of the packs that holds documents."""
        return self.tokens / (self.packs * self.max_seq_len) if self.packs else 0.0

    def add_rows(self, encoded: Encoded, name: str) -> None:
        """Count the rows of one chunk, and what is left out of them; `accept` does the rest."""
        self.rows += encoded.num_accepted + len(encoded.rejected)
        self.accepted += encoded.num_accepted
        self.tokens_encoded += encoded.num_tokens
        self.repeated += encoded.repeated
        for shape, number in encoded.shapes.items():
            self.shapes[shape] = self.shapes.get(shape, 0) + number
        for place, rejected in encoded.rejected:
            self.rejected[rejected.reason] = self.rejected.get(rejected.reason, 0) + 1
            example = f"{name}:{place}: {rejected.detail}"
            self.first_rejected.setdefault(rejected.reason, example)
        for dropped in encoded.dropped:
            self.tokens_in += dropped.num_tokens
            self._drop(dropped.num_tokens, dropped.reason)

    def accept(self, full: int, kept: int) -> None:
        """Count a document of `full` tokens of which `kept` go into a pack; 0: it is dropped."""
        self.tokens_in += full
        if kept == 0 < full:
            self._drop(full, "overlong")
            return
        self.documents += 1
        self.tokens += kept
        self.tokens_cut += full - kept
        self.cut_documents += full > kept

    def _drop(self, num_tokens: int, reason: str) -> None:
        self.dropped_documents += 1
        self.tokens_dropped += num_tokens
        self.dropped[reason] = self.dropped.get(reason, 0) + num_tokens

    def check(self) -> None:
        """Raise RuntimeError, a bug of ours, if a row or a token is unaccounted for."""
        accounted = self.tokens + self.tokens_cut + self.tokens_dropped
        facts = (
            (self.tokens_encoded, accounted, "tokens"),
            (self.tokens_in, accounted, "tokens of documents"),
            (self.tokens_dropped, sum(self.dropped.values()), "dropped tokens"),
            (self.rows, self.accepted + self.num_rejected, "rows"),
            (self.rows, sum(self.shapes.values()), "rows by shape"),
        )
        for came, went, what in facts:
            if came != went:
                raise RuntimeError(f"{came} {what} came in and {went} are accounted for")

    def reasons(self) -> list[str]:
        """Each reason with its number and first row, most frequent first."""
        return [
            f"{reason}: {number} (first {self.first_rejected[reason]})"
            for reason, number in _by_number(self.rejected)
        ]

    def shapes_seen(self) -> str:
        return ", ".join(f"{shape} {number:,}" for shape, number in _by_number(self.shapes))

    def manifest(self) -> dict[str, Any]:
        return {
            "counts": {
                "rows": self.rows,
                "documents": self.documents,
                "rejected": self.num_rejected,
                "duplicates": self.duplicates,
                "tokens_in": self.tokens_in,
                "tokens": self.tokens,
                "trained_tokens": self.trained_tokens,
                "packs": self.packs,
                "cut_documents": self.cut_documents,
                "tokens_cut": self.tokens_cut,
                "dropped_documents": self.dropped_documents,
                "tokens_dropped": self.tokens_dropped,
            },
            "shapes": dict(sorted(self.shapes.items())),
            "dropped_tokens": dict(sorted(self.dropped.items())),
            "rejected": dict(sorted(self.rejected.items())),
            "first_rejected": dict(sorted(self.first_rejected.items())),
        }


def _by_number(counted: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))


def refuse_nothing(counts: Counts, inputs: str, template: str) -> None:
    """Raise DataError if a part holds nothing to train on.

    `inputs` and `template` are their names, for the message.
    """
    if counts.rows == 0:
        raise DataError(f"{inputs} holds no row: --input needs chats, an object a line or a row")
    if counts.documents == 0:
        _refuse_all(counts, inputs, template)


def refuse_too_many(parts: Sequence[Counts], max_rejected: float) -> None:
    """Raise DataError if too many rows of all parts together cannot be used."""
    rows = sum(counts.rows for counts in parts)
    on_purpose = sum(counts.rejected.get(reason, 0) for counts in parts for reason in ON_PURPOSE)
    faults = sum(counts.num_rejected for counts in parts) - on_purpose
    if faults / rows > max_rejected:
        reasons = "; ".join(reason for counts in parts for reason in counts.reasons())
        raise DataError(
            f"{faults} of {rows} rows ({faults / rows:.1%}) cannot be used, more than "
            f"--max-rejected {max_rejected:g} allows: {reasons}; repair the rows or allow more"
        )


def _refuse_all(counts: Counts, inputs: str, template: str) -> None:
    """Say why no row can be used: the rejected, the dropped, and the shapes if these are why."""
    why = counts.reasons()
    why += [f"{tokens} tokens dropped as {reason}" for reason, tokens in counts.dropped.items()]
    if "template_error" in counts.rejected:
        why.append(f"the chat template is {template}")
    shapes = ""
    if counts.shapes.get(UNKNOWN, 0) + counts.shapes.get(UNREADABLE, 0):
        shapes = f"; shapes seen: {counts.shapes_seen()}; accepted: {', '.join(READERS)}"
    too_long = {"overlong", "no_trained_token_after_cut"} & counts.dropped.keys()
    way_out = "; raise --max-seq-len, or choose another --overlong" if too_long else ""
    raise DataError(
        f"no usable row among {counts.rows} of {inputs}: {'; '.join(why)}{way_out}{shapes}"
    )


def print_report(console: Console, counts: Counts, overlong: str, packing: str) -> None:
    """The counts, one fact a line; `overlong` and `packing` are the flags'."""
    say = console.print
    say(
        f"rows         {counts.rows:,} in, {counts.accepted:,} accepted, "
        f"{counts.num_rejected:,} rejected"
    )
    say(f"shapes       {counts.shapes_seen()}", markup=False)
    for reason in counts.reasons():
        say(f"  rejected   {reason}", markup=False)
    if counts.duplicates:
        what = "dropped" if "duplicate" in counts.dropped else "kept; --drop-duplicates drops them"
        say(f"duplicates   {counts.duplicates:,} rows equal an earlier one ({what})")
    if counts.repeated.rows:
        _say_repeated(console, counts)
    say(
        f"documents    {counts.documents:,} with {counts.tokens:,} tokens "
        f"({counts.tokens / counts.documents:,.0f} each)"
    )
    say(
        f"trained      {counts.trained_tokens:,} tokens "
        f"({counts.trained_tokens / counts.tokens:.1%} of all)"
    )
    if counts.cut_documents:
        say(
            f"cut          {counts.cut_documents:,} documents longer than {counts.max_seq_len}, "
            f"losing {counts.tokens_cut:,} tokens (--overlong {overlong})"
        )
    for reason, tokens in _by_number(counts.dropped):
        say(f"dropped      {tokens:,} tokens ({reason})")
    say(f"packs        {counts.packs:,} of {counts.max_seq_len} tokens, fill {counts.fill:.1%}")
    if counts.fill < LOW_FILL:
        say(
            f"warning: {1 - counts.fill:.0%} of every step computes padding (documents have "
            f"{counts.tokens / counts.documents:,.0f} tokens on average): {_FULLER[packing]}"
        )


def _say_repeated(console: Console, counts: Counts) -> None:
    """What it costs that the template rewrites turns: each sample renders the ones before again."""
    repeated = counts.repeated
    factor = counts.tokens_encoded / (counts.tokens_encoded - repeated.tokens)
    console.print(
        f"samples      {repeated.rows:,} rows became {repeated.samples:,} documents, since the "
        f"template rewrites earlier turns (--history split): {factor:.1f} times the tokens of one "
        "document a row, which --train-on last-assistant or, with a marked template, --history "
        "levanter makes"
    )


def print_leak(console: Console, num_leaked: int) -> None:
    """Warn of validation rows that the model is trained on."""
    if num_leaked:
        console.print(
            f"warning: {num_leaked:,} validation rows are also trained: --drop-duplicates leaves "
            "them out of the training part"
        )


def print_statistics(console: Console, counts: Counts, packing: dict[str, Any]) -> None:
    """Lengths and fills as tables, beside the report."""
    from rich.table import Table

    for title, name in (
        ("tokens of a document", "document_lengths"),
        ("documents in a pack", "documents_per_pack"),
    ):
        table = Table("from", "to", "number", "share", title=title, title_justify="left")
        bounds, numbers = packing[name]["bounds"], packing[name]["counts"]
        for low, high, number in zip(bounds, bounds[1:], numbers, strict=False):
            share = f"{number / max(1, sum(numbers)):.1%}"
            table.add_row(f"{low:,}", f"{high - 1:,}", f"{number:,}", share)
        console.print(table)
    table = Table("counted", "number", title="all", title_justify="left")
    for name, number in counts.manifest()["counts"].items():
        table.add_row(name.replace("_", " "), f"{number:,}")
    table.add_row("fill", f"{counts.fill:.2%}")
    console.print(table)
