"""`ds-sft prepare`: chats -> a packed data set, and its validation part.

Owns the order of things. One pass over each part, documents written as they come; the same bytes
for any number of workers.

Invariants: every row read is either in a pack, dropped or rejected, and counted as such; tokens of
accepted documents = packed + cut + dropped, which is checked before anything takes its name.
Nothing is under `--out` until all of it, the validation part too, is on disk.
Left to others: flags (`prepare_flags`), which rows (`inputs`, `draws`), what they hold (`rows`),
masks (`chat`), packs (`packs`), files (`packed_writer`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_sft.data.chat import ChatEncoder
from ds_sft.data.console import open_console
from ds_sft.data.draws import Draw, Take, must_count, plan
from ds_sft.data.duplicates import Duplicates
from ds_sft.data.inputs import Tables, open_inputs, refuse_unused
from ds_sft.data.packed import MANIFEST, TOKENIZER_DIR, VALIDATION_DIR, file_sha256
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.packing import LEVANTER_MAX_DOCS
from ds_sft.data.packs import Packs
from ds_sft.data.pipeline import Job, build_encoder, encode_files
from ds_sft.data.prepare_flags import PrepareFlags as PrepareFlags
from ds_sft.data.report import (
    Counts,
    print_leak,
    print_report,
    print_statistics,
    refuse_nothing,
    refuse_too_many,
)
from ds_sft.data.rows import Reading
from ds_sft.data.template import SHIPPED, read_template
from ds_sft.data.tokenizer import (
    borrowed_template,
    load_tokenizer,
    save_tokenizer,
    tokenizer_hash,
)
from ds_sft.errors import ConfigError, DataError
from ds_sft.presets import describe

WORKERS_PER_CORE = 4
"""Beyond this, processes only take memory from each other."""

if TYPE_CHECKING:
    from rich.console import Console


def run(flags: PrepareFlags) -> None:
    """The command. Raises DataError or ConfigError; then nothing is left under `--out`."""
    _check_workers(flags.workers)
    try:
        if flags.stats_only or flags.out is None:
            with tempfile.TemporaryDirectory() as work:
                _prepare(flags, None, Path(work))
            return
        with PackedWriter(flags.out, flags.max_seq_len, replace=flags.force) as writer:
            _prepare(flags, writer, writer.partial)
    except OSError as error:
        what = "temporary files" if flags.stats_only else f"--out {flags.out}"
        where = f"{error.filename}: " if error.filename else ""
        raise DataError(f"{what} cannot be written ({where}{error.strerror})") from None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _check_workers(workers: int) -> None:
    most = WORKERS_PER_CORE * _cores()
    if workers > most:
        raise ConfigError(
            f"--workers {workers}: on the {_cores()} cores here at most {most}; 0 takes one a core"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What both parts share."""

    flags: PrepareFlags
    console: Console
    job: Job
    encoder: ChatEncoder
    duplicates: Duplicates
    facts: dict[str, Any]
    """What the manifests of both parts say of the tokenizer, the template and the flags."""


def _prepare(flags: PrepareFlags, writer: PackedWriter | None, work: Path) -> None:
    how = Tables(split=flags.split, subset=flags.subset, columns=frozenset(flags.columns.values()))
    inputs = open_inputs(flags.inputs, how)
    held_out = open_inputs(flags.validation_inputs, how, "--validation-input")
    refuse_unused(how, [*inputs, *held_out])
    run = _start(flags, work / TOKENIZER_DIR)
    draw = Draw(
        seed=flags.seed,
        validation_fraction=flags.validation_fraction,
        max_samples=flags.max_samples,
    )
    if must_count([*inputs, *held_out], draw):
        run.console.print("counting the rows, for the draw")
    train, validation = plan(inputs, held_out, draw)
    # First, so that --drop-duplicates takes its rows out of the training part.
    held = _validation_part(run, validation, writer) if validation else None
    _training_part(run, train, writer, held)
    if flags.out is not None and writer is not None:
        run.console.print(f"wrote {flags.out}", markup=False)


def _start(flags: PrepareFlags, tokenizer_dir: Path) -> _Run:
    """Load and store the tokenizer, and say what the template will not do."""
    console = open_console(needs_reader=False)
    for line in describe(flags.preset, flags.preset_origins):
        console.print(line, markup=False)
    tokenizer = load_tokenizer(flags.tokenizer)
    if flags.chat_template:
        template, name, donor = read_template(flags.chat_template), flags.chat_template, ""
    else:
        borrowed = borrowed_template(tokenizer, flags.tokenizer, flags.chat_template_from)
        template, donor = borrowed.template, borrowed.donor
        name = f"of {donor}"
        if borrowed.reason:
            console.print(borrowed.reason, markup=False)
    save_tokenizer(tokenizer, template, tokenizer_dir)
    job = Job(
        tokenizer_file=tokenizer_dir / "tokenizer.json",
        template=template,
        template_name=name,
        special_tokens=tokenizer.special_tokens_map,
        max_seq_len=flags.max_seq_len,
        overlong=flags.overlong,
        reading=Reading(flags.shape, flags.columns, flags.max_chars),
        train_on=flags.train_on,
        thinking=flags.thinking,
        on_rewrite=flags.on_rewrite,
    )
    if flags.history == "auto" and flags.on_rewrite == "levanter":
        console.print(
            f"history      levanter, since {flags.chat_template} is the recipes' template: each "
            "conversation is one sample, as Levanter trains it (--history split trains each turn "
            "as inference asks for it)"
        )
    encoder = build_encoder(job)
    for warning in encoder.warnings:
        console.print(f"warning: {warning}", markup=False)
    return _Run(
        flags=flags,
        console=console,
        job=job,
        encoder=encoder,
        duplicates=Duplicates(drop=flags.drop_duplicates),
        facts=_facts(flags, tokenizer_hash(tokenizer), encoder, donor),
    )


def _facts(
    flags: PrepareFlags, hash_of_tokenizer: str, encoder: ChatEncoder, donor: str
) -> dict[str, Any]:
    """What both manifests say of the tokenizer, the template and the flags."""
    return {
        "tokenizer": flags.tokenizer,
        "tokenizer_hash": hash_of_tokenizer,
        "chat_template": flags.chat_template if flags.chat_template in SHIPPED else "",
        "chat_template_from": "" if donor == flags.tokenizer else donor,
        "chat_template_sha256": encoder.template.sha256,
        "mask_from": "marks" if encoder.template.has_marks else "prefixes",
        "masks": {
            "train_on": flags.train_on,
            "thinking": flags.thinking,
            "history": flags.on_rewrite,
        },
        "reading": {
            "format": flags.format,
            "columns": flags.columns,
            "max_chars": flags.max_chars,
            "drop_duplicates": flags.drop_duplicates,
            "seed": flags.seed,
            "max_samples": flags.max_samples,
            "validation_fraction": flags.validation_fraction,
        },
    }


def _validation_part(run: _Run, takes: list[Take], writer: PackedWriter | None) -> Counts:
    """The validation part, a packed data set of its own inside the other; returns its counts."""
    run.console.print("validation part:")
    inner = writer and PackedWriter(writer.partial / VALIDATION_DIR, run.flags.max_seq_len)
    with inner or nullcontext():
        if writer and inner:
            shutil.copytree(writer.tokenizer_dir, inner.tokenizer_dir)
        part = _pack(run, takes, inner, "the validation part", validation=True)
        _finish(run, part, inner, {})
    run.console.print("training part:")
    return part.counts


def _training_part(
    run: _Run, takes: list[Take], writer: PackedWriter | None, held: Counts | None
) -> None:
    """The rest; bad rows are judged over both parts, `held` being the other's counts."""
    part = _pack(run, takes, writer, ", ".join(run.flags.inputs), validation=False)
    both = [held, part.counts] if held else [part.counts]
    refuse_too_many(both, run.flags.max_rejected)
    more: dict[str, Any] = {}
    if held:
        more["validation"] = held.manifest()["counts"]
        more["validation_rows_trained"] = run.duplicates.num_leaked
    if held and writer:
        more["validation_sha256"] = file_sha256(writer.partial / VALIDATION_DIR / MANIFEST)
    _finish(run, part, writer, more)
    print_leak(run.console, run.duplicates.num_leaked)


@dataclass(frozen=True, slots=True)
class _Part:
    takes: list[Take]
    counts: Counts
    packing: dict[str, Any]


def _pack(
    run: _Run, takes: list[Take], writer: PackedWriter | None, what: str, *, validation: bool
) -> _Part:
    """Pack the rows that are taken. Raises DataError if none can be used."""
    flags = run.flags
    counts = Counts(flags.max_seq_len)
    max_docs = flags.max_docs_per_pack or LEVANTER_MAX_DOCS
    packs = Packs(writer, counts, packing=flags.packing, max_docs=max_docs)
    with _progress(run.console, takes) as advance:
        for encoded in encode_files(takes, run.job, run.encoder, flags.workers or _cores()):
            take = takes[encoded.source]
            encoded, duplicates = run.duplicates.sift(encoded, take.file, validation=validation)
            counts.duplicates += duplicates
            packs.add(encoded, take.source.name)
            advance(encoded.num_bytes)
        refuse_nothing(counts, what, run.job.template_name)
        packs.flush()
    counts.check()
    return _Part(takes, counts, {**packs.manifest(), "overlong": flags.overlong})


def _finish(run: _Run, part: _Part, writer: PackedWriter | None, more: dict[str, Any]) -> None:
    """Report, and commit the writer; `more` goes into the manifest."""
    print_report(run.console, part.counts, run.flags.overlong, run.flags.packing)
    if run.flags.stats_only:
        print_statistics(run.console, part.counts, part.packing)
    if writer is not None:
        facts = {**run.facts, "sources": _sources(part.takes), **part.counts.manifest()}
        writer.commit({**facts, "packing": part.packing, **more})


def _sources(takes: list[Take]) -> list[dict[str, Any]]:
    """Each source once, in order; how often and how much of it was taken, if not once and all."""
    passes: dict[int, list[Take]] = {}
    for take in takes:
        passes.setdefault(take.file, []).append(take)
    facts = []
    for those in passes.values():
        more: dict[str, Any] = {"repeats": len(those)} if len(those) > 1 else {}
        kept = [take.keep for take in those if take.keep is not None]
        if not all(keep.all() for keep in kept):
            more["rows_taken"] = sum(int(keep.sum()) for keep in kept)
        facts.append({**those[0].source.facts(), **more})
    return facts


@contextmanager
def _progress(console: Console, takes: list[Take]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of the input, on a terminal only."""
    from rich.progress import Progress

    total = sum(take.source.size for take in takes)
    # Drawn as chunks come in: the bar's own thread would forbid forking workers.
    shown = console.is_terminal
    with Progress(console=console, auto_refresh=False, transient=True, disable=not shown) as bar:
        task = bar.add_task("prepare", total=total)
        yield lambda done: bar.update(task, advance=done, refresh=shown)
