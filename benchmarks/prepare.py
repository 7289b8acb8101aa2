"""Speed of `ds-sft prepare`'s encoding beside the tokenizer alone, in one run, as ratios.

    python benchmarks/prepare.py --tokenizer DIR --chats a.jsonl [b.jsonl ...] [--template qwen3]

The tokenizer's `encode_batch` gets the texts already rendered and uses all cores by itself; ours
reads lines, parses, renders, tokenizes, masks and checks them on all cores. Start-up of the workers
is in our time. Each file is repeated until it holds --rows rows; the two take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from ds_sft.data.draws import Take
from ds_sft.data.pipeline import Job, build_encoder, encode_files
from ds_sft.data.records import Rejected
from ds_sft.data.rows import parse_row
from ds_sft.data.sources import TextSource
from ds_sft.data.template import ChatTemplate, read_template
from ds_sft.data.tokenizer import borrowed_template, load_backend, load_tokenizer, save_tokenizer

BATCH = 4096  # rows that `encode_batch` gets at a time: its memory is bounded too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--chats", type=Path, nargs="+", required=True)
    parser.add_argument("--template", default="", help="qwen3, a FILE, or empty: the tokenizer's")
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        tokenizer = load_tokenizer(args.tokenizer)
        template = (
            read_template(args.template)
            if args.template
            else borrowed_template(tokenizer, args.tokenizer).template
        )
        save_tokenizer(tokenizer, template, Path(work, "tokenizer"))
        job = Job(
            tokenizer_file=Path(work, "tokenizer/tokenizer.json"),
            template=template,
            template_name=args.template or "own",
            special_tokens=tokenizer.special_tokens_map,
            max_seq_len=32768,
            overlong="left",
        )
        for chats in args.chats:
            measure(chats, job, Path(work), args)


def measure(chats: Path, job: Job, work: Path, args: argparse.Namespace) -> None:
    """Print the ratio for one file of chats."""
    lines = chats.read_bytes().splitlines(keepends=True)
    repeats = -(-args.rows // len(lines))
    many = work / chats.name
    many.write_bytes(b"".join(lines) * repeats)
    template = ChatTemplate(job.template, job.special_tokens, job.template_name)
    parsed = [parse_row(line).result for line in lines]
    rows = [row for row in parsed if not isinstance(row, Rejected)]
    texts = [template.render(row.messages, row.tools) for row in rows] * repeats
    backend, encoder = load_backend(job.tokenizer_file), build_encoder(job)
    alone, ours = [], []
    cores = len(os.sched_getaffinity(0))
    for _ in range(args.rounds):
        started = time.monotonic()
        tokens = 0
        for i in range(0, len(texts), BATCH):
            batch = backend.encode_batch(texts[i : i + BATCH], add_special_tokens=False)
            tokens += sum(len(encoding) for encoding in batch)
        alone.append(tokens / (time.monotonic() - started))
        started = time.monotonic()
        done = list(encode_files([Take(TextSource(many))], job, encoder, cores))
        seconds = time.monotonic() - started
        ours.append(sum(len(chunk.tokens) for chunk in done) / seconds)
        del done
    ratio = statistics.median(a / b for a, b in zip(ours, alone, strict=True))
    kind = "marks" if encoder.template.has_marks else "prefixes"
    print(
        f"{chats.name:<32} {kind:<9} {statistics.median(ours):10.0f} tok/s  "
        f"encode_batch {statistics.median(alone):10.0f} tok/s  ratio {ratio:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
