"""`ds-sft prepare`: chat files -> a packed data set.

Owns the command: its flags and the order of things. One pass, documents written as they come; the
same bytes for any number of workers.

Invariants: every row read is either in a pack, dropped or rejected, and counted as such; tokens of
accepted documents = packed + cut + dropped. Nothing is under `--out` until all of it is on disk.
Left to others: rows (`records`), masks (`chat`), packs (`packing`), files (`packed`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.packing import LEVANTER_MAX_DOCS, Overlong, Packing
from ds_sft.data.packs import Packs
from ds_sft.data.pipeline import Job, build_encoder, encode_files
from ds_sft.data.records import LineReader
from ds_sft.data.report import Counts, print_report, refuse_bad_input
from ds_sft.data.template import SHIPPED, read_template
from ds_sft.data.tokenizer import load_tokenizer, own_template, save_tokenizer, tokenizer_hash
from ds_sft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console


MAX_SEQ_LEN = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFlags:
    """Turn chats (JSON lines with OpenAI `messages`) into a packed data set."""

    input: tuple[Path, ...]
    """Files of JSON lines, read in this order."""
    tokenizer: str
    """Tokenizer: a directory, or a model's id on the Hub."""
    out: Path
    """Directory to write; appears only when it is whole."""
    max_seq_len: int = 32768
    """Length of a pack in tokens."""
    chat_template: str = ""
    """`qwen3` (the shipped training template) or a FILE; empty: the tokenizer's own."""
    overlong: Overlong = "left"
    """Documents longer than a pack: an error, keep the first tokens or the last, drop, or split."""
    packing: Packing = "next-fit"
    """next-fit (Levanter's, in document order), best-fit (fuller packs), none (a document each)."""
    max_docs_per_pack: int = 0
    """Most documents in a pack of next-fit; 0: 64, as Levanter. Best-fit has no such limit."""
    max_rejected: float = 0.01
    """Largest share of rows that may be unusable, 0 to 1; above it nothing is written."""
    workers: int = 0
    """Processes; 0: one per core."""
    force: bool = False
    """Replace an existing --out."""

    def __post_init__(self) -> None:
        checks = [
            (len(self.input) > 0, "--input names no file: give at least one"),
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
            (self.workers >= 0, f"--workers {self.workers}: must be 0 (all cores) or more"),
        ]
        for holds, message in checks:
            if not holds:
                raise ConfigError(message)


def run(flags: PrepareFlags) -> None:
    """The command. Raises DataError or ConfigError; then nothing is left under `--out`."""
    readers = [LineReader(path) for path in flags.input]
    for path in flags.input:
        if not path.is_file():
            raise DataError(f"--input {path} is not a file: check the name")
    try:
        with PackedWriter(flags.out, flags.max_seq_len, replace=flags.force) as writer:
            _prepare(flags, readers, writer)
    except OSError as error:
        where = error.filename or flags.out
        raise DataError(
            f"--out {flags.out} cannot be written ({where}: {error.strerror})"
        ) from None


def _prepare(flags: PrepareFlags, readers: list[LineReader], writer: PackedWriter) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(flags.tokenizer)
    template = (
        read_template(flags.chat_template)
        if flags.chat_template
        else own_template(tokenizer, flags.tokenizer)
    )
    save_tokenizer(tokenizer, template, writer.tokenizer_dir)
    job = Job(
        tokenizer_file=writer.tokenizer_dir / "tokenizer.json",
        template=template,
        template_name=flags.chat_template or f"of {flags.tokenizer}",
        special_tokens=tokenizer.special_tokens_map,
        max_seq_len=flags.max_seq_len,
        overlong=flags.overlong,
    )
    encoder = build_encoder(job)
    if not encoder.trains_stop:
        console.print(
            f"warning: chat template {job.template_name} leaves the stop token outside its marks: "
            "the model will not learn to end its turn"
        )
    counts = Counts(flags.max_seq_len)
    max_docs = flags.max_docs_per_pack or LEVANTER_MAX_DOCS
    packs = Packs(writer, counts, packing=flags.packing, max_docs=max_docs)
    with _progress(console, readers) as advance:
        workers = flags.workers or len(os.sched_getaffinity(0))
        for encoded in encode_files(readers, job, encoder, workers):
            packs.add(encoded, str(readers[encoded.source].path))
            advance(encoded.num_bytes)
        packs.flush()
    refuse_bad_input(counts, flags.max_rejected, ", ".join(map(str, flags.input)))
    print_report(console, counts, flags.overlong)
    writer.commit(
        {
            "tokenizer": flags.tokenizer,
            "tokenizer_hash": tokenizer_hash(tokenizer),
            "chat_template": flags.chat_template if flags.chat_template in SHIPPED else "",
            "chat_template_sha256": encoder.template.sha256,
            "mask_from": "marks" if encoder.template.has_marks else "prefixes",
            "sources": [_source(reader) for reader in readers],
            **counts.manifest(),
            "packing": {**packs.manifest(), "overlong": flags.overlong},
        }
    )
    console.print(f"wrote {flags.out}", markup=False)


def _source(reader: LineReader) -> dict[str, Any]:
    return {
        "path": str(reader.path),
        "bytes": reader.num_bytes,
        "lines": reader.num_lines,
        "sha256": reader.sha256,
    }


@contextmanager
def _progress(console: Console, readers: list[LineReader]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of the input, on a terminal only."""
    from rich.progress import Progress

    total = sum(reader.path.stat().st_size for reader in readers)
    # Drawn as chunks come in: the bar's own thread would forbid forking workers.
    shown = console.is_terminal
    with Progress(console=console, auto_refresh=False, transient=True, disable=not shown) as bar:
        task = bar.add_task("prepare", total=total)
        yield lambda done: bar.update(task, advance=done, refresh=shown)
