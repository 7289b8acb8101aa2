"""The flags of `ds-sft prepare`, and what may not be combined.

Left to others: what the flags do (`prepare`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ds_sft.data.packing import Overlong, Packing
from ds_sft.data.shapes import COLUMNS, READERS
from ds_sft.data.template import SHIPPED
from ds_sft.data.thinking import Thinking
from ds_sft.data.turns import OnRewrite, TrainOn
from ds_sft.errors import ConfigError

MAX_SEQ_LEN = 2**24

Format = Literal[
    "auto",
    "messages",
    "typed-parts",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "eliza-native",
    "eliza-trajectory",
    "eliza-flat",
]
History = Literal["auto", "split", "refuse", "levanter"]
Words = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFlags:
    """Turn chats (JSON, Parquet, data sets; every usual shape) into a packed data set."""

    input: Words
    """Files, directories, patterns or a data set's id, in this order; :3 repeats, :0.5 draws."""
    tokenizer: str
    """Tokenizer: a directory, or a model's id on the Hub."""
    out: Path | None = None
    """Directory to write; appears only when it is whole."""
    recipe: str = ""
    """Take chat template and length from a recipe or model entry (`ds-sft recipes`) or a .toml
    file; a preset and flags given here win over it."""
    preset: str = ""
    """Length (and number of rows) for one card: smoke-12gb, 16gb, 24gb or 80gb; flags given here
    win over it."""
    preset_origins: tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]] = ()
    """Where the fields that a preset may decide have their values from; no flag."""
    max_seq_len: int = 32768
    """Length of a pack in tokens."""
    format: Format = "auto"
    """Shape of every row; auto: recognised row by row."""
    split: str = "train"
    """Split of a data set (a Hub id or a save_to_disk directory)."""
    subset: str = ""
    """Subset (configuration) of a data set on the Hub."""
    messages_column: str = ""
    """Key or column that holds the messages."""
    prompt_column: str = ""
    """Key or column that holds the prompt."""
    completion_column: str = ""
    """Key or column that holds the completion."""
    tools_column: str = ""
    """Key or column that holds the tools."""
    system_column: str = ""
    """Key or column that holds the system prompt."""
    max_samples: int = 0
    """Most rows, drawn with --seed; validation takes a tenth of it, at least 1; 0: all rows."""
    seed: int = 0
    """Of every draw of rows."""
    drop_duplicates: bool = False
    """Drop rows whose tokens and mask equal an earlier row's."""
    max_chars: int = 0
    """Reject rows whose turns have more characters than this; 0: none."""
    validation_fraction: float = 0.0
    """Share of the rows that goes into OUT/validation instead, drawn with --seed."""
    validation_input: Words = ()
    """What goes into OUT/validation, spelt as for --input."""
    chat_template: str = ""
    """`qwen3` (the shipped training template) or a FILE; empty: the tokenizer's own."""
    chat_template_from: str = ""
    """Take this tokenizer's chat template; a base model without one tries its tuned sibling."""
    train_on: TrainOn = "assistant"
    """Every assistant turn, the last one only, or every token."""
    thinking: Thinking = "keep"
    """Reasoning: keep, strip-history (keep the last turn's), drop-empty (blocks), drop (all)."""
    history: History = "auto"
    """Turns that the template rewrites later on: split (a sample each), refuse the row, levanter
    (one sample, rewritten); auto: levanter for the recipe's own template, else split."""
    overlong: Overlong = "left"
    """Documents longer than a pack: an error, keep the first tokens or the last, drop, or split."""
    packing: Packing = "next-fit"
    """next-fit (Levanter's, in document order), best-fit (fuller packs), none (a document each)."""
    max_docs_per_pack: int = 0
    """Most documents in a pack of next-fit; 0: 64, as Levanter. Best-fit has no such limit."""
    max_rejected: float = 0.01
    """Largest share of rows that may be unusable, 0 to 1; above it nothing is written."""
    stats_only: bool = False
    """Count and print, write nothing."""
    workers: int = 0
    """Processes; 0: one per core."""
    force: bool = False
    """Replace an existing --out."""

    def __post_init__(self) -> None:
        checks = [
            (
                len(self.inputs) > 0 and () not in self.input,
                "--input names no file: give at least one",
            ),
            (
                () not in self.validation_input,
                "--validation-input names no file: give at least one, or leave it out",
            ),
            (
                self.out is not None or self.stats_only,
                "--out is missing: name the directory to write, or add --stats-only",
            ),
            (
                2 <= self.max_seq_len <= MAX_SEQ_LEN,
                f"--max-seq-len {self.max_seq_len}: must be from 2 to {MAX_SEQ_LEN}",
            ),
            (
                self.max_docs_per_pack >= 0,
                f"--max-docs-per-pack {self.max_docs_per_pack}: must be 0 (64) or more",
            ),
            (
                self.packing == "next-fit" or self.max_docs_per_pack == 0,
                f"--max-docs-per-pack {self.max_docs_per_pack} is a limit of next-fit, which "
                f"--packing {self.packing} does not have: drop one of the two",
            ),
            (
                0 <= self.max_rejected <= 1,
                f"--max-rejected {self.max_rejected}: must be a share from 0 to 1",
            ),
            (
                0 <= self.validation_fraction < 1,
                f"--validation-fraction {self.validation_fraction}: must be 0 (none) or a share "
                "less than 1",
            ),
            (
                not (self.validation_fraction and self.validation_inputs),
                "--validation-fraction and --validation-input exclude each other: drop one",
            ),
            (
                not (self.chat_template and self.chat_template_from),
                "--chat-template and --chat-template-from exclude each other: drop one",
            ),
            (self.max_samples >= 0, f"--max-samples {self.max_samples}: must be 0 (all) or more"),
            (self.max_chars >= 0, f"--max-chars {self.max_chars}: must be 0 (no limit) or more"),
            (0 <= self.seed < 2**63, f"--seed {self.seed}: must be from 0 to {2**63 - 1}"),
            (self.workers >= 0, f"--workers {self.workers}: must be 0 (all cores) or more"),
        ]
        for holds, message in checks:
            if not holds:
                raise ConfigError(message)

    @property
    def inputs(self) -> list[str]:
        """What --input names, in order."""
        return _flat(self.input)

    @property
    def validation_inputs(self) -> list[str]:
        """What --validation-input names, in order."""
        return _flat(self.validation_input)

    @property
    def on_rewrite(self) -> OnRewrite:
        """What --history means for this template."""
        if self.history != "auto":
            return self.history
        return "levanter" if self.chat_template in SHIPPED else "split"

    @property
    def shape(self) -> str:
        """The shape that --format forces; empty: none."""
        assert self.format == "auto" or self.format in READERS
        return "" if self.format == "auto" else self.format

    @property
    def columns(self) -> dict[str, str]:
        """Where the keys of shapes.COLUMNS are found under another name."""
        found = {name: getattr(self, f"{name}_column") for name in COLUMNS}
        return {name: column for name, column in found.items() if column}


def _flat(words: tuple[tuple[str, ...] | str | Path, ...]) -> list[str]:
    """Each flag may hold several words; code may give a word by itself."""
    flat: list[str] = []
    for word in words:
        flat += [str(word)] if isinstance(word, str | Path) else [str(one) for one in word]
    return flat
