"""What `prepare` counts, and how it says so.

Owns the counters of one preparation, the refusal of too many bad rows, and the lines printed.
Every row is counted once, as a document or under the reason that it was rejected for; the tokens
of accepted rows are packed, cut off or dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_sft.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

    from ds_sft.data.pipeline import Encoded

LOW_FILL = 0.8


@dataclass(slots=True)
class Counts:
    """`tokens_in` = `tokens` + `tokens_cut` + `tokens_dropped`, over accepted rows."""

    max_seq_len: int
    rows: int = 0
    documents: int = 0
    tokens_in: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    packs: int = 0
    cut_documents: int = 0
    tokens_cut: int = 0
    dropped_documents: int = 0
    tokens_dropped: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
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

    def reasons(self) -> list[str]:
        """Each reason with its number and first row, most frequent first."""
        ordered = sorted(self.rejected.items(), key=lambda item: (-item[1], item[0]))
        return [
            f"{reason}: {number} (first {self.first_rejected[reason]})"
            for reason, number in ordered
        ]

    def manifest(self) -> dict[str, Any]:
        return {
            "counts": {
                "rows": self.rows,
                "documents": self.documents,
                "rejected": self.num_rejected,
                "tokens_in": self.tokens_in,
                "tokens": self.tokens,
                "trained_tokens": self.trained_tokens,
                "packs": self.packs,
                "cut_documents": self.cut_documents,
                "tokens_cut": self.tokens_cut,
                "dropped_documents": self.dropped_documents,
                "tokens_dropped": self.tokens_dropped,
            },
            "dropped_tokens": dict(sorted(self.dropped.items())),
            "rejected": dict(sorted(self.rejected.items())),
            "first_rejected": dict(sorted(self.first_rejected.items())),
        }


def refuse_bad_input(counts: Counts, max_rejected: float, inputs: str) -> None:
    """Raise DataError if nothing can be trained on, or too many rows cannot."""
    reasons = "; ".join(counts.reasons())
    if counts.rows == 0:
        raise DataError(f"{inputs} holds no row: --input needs JSON lines with `messages`")
    if counts.documents == 0:
        dropped = f"{counts.dropped_documents} dropped as longer than {counts.max_seq_len} tokens"
        why = reasons or dropped
        raise DataError(f"no usable row among {counts.rows} of {inputs}: {why}")
    share = counts.num_rejected / counts.rows
    if share > max_rejected:
        raise DataError(
            f"{counts.num_rejected} of {counts.rows} rows ({share:.1%}) cannot be used, more than "
            f"--max-rejected {max_rejected:g} allows: {reasons}; repair the rows or allow more"
        )


def print_report(console: Console, counts: Counts, flags_overlong: str) -> None:
    """The counts, one fact a line."""
    say = console.print
    say(
        f"rows         {counts.rows:,} in, {counts.rows - counts.num_rejected:,} accepted, "
        f"{counts.num_rejected:,} rejected"
    )
    for reason in counts.reasons():
        say(f"  rejected   {reason}", markup=False)
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
            f"losing {counts.tokens_cut:,} tokens (--overlong {flags_overlong})"
        )
    for reason, tokens in sorted(counts.dropped.items()):
        say(f"dropped      {tokens:,} tokens as {reason} (--overlong {flags_overlong})")
    say(f"packs        {counts.packs:,} of {counts.max_seq_len} tokens, fill {counts.fill:.1%}")
    if counts.fill < LOW_FILL:
        say(
            f"warning: {1 - counts.fill:.0%} of every step computes padding; change --max-seq-len "
            f"or --max-docs-per-pack (documents have {counts.tokens / counts.documents:,.0f} "
            "tokens on average)"
        )
