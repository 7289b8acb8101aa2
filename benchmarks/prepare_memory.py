"""Speed and memory of `ds-sft prepare` over many rows, for each kind of packing.

    python benchmarks/prepare_memory.py --tokenizer DIR --chats a.jsonl [b.jsonl ...] \\
        --rows 50000 100000 [--template qwen3] [--work DIR]

Rows are conversations of several turns, made from the turns of the given chats with a seed: their
lengths spread as lognormally as people's do. For each number of rows the command runs in a process
of its own, while this one reads the resident memory of it and its workers four times a second; the
sum counts pages that processes share once for each. Memory is flat when the peak does not grow
with the rows. The tokenizer alone (`encode_batch`, rendered texts, the same cores) is timed on a
sample of the same rows before and after. --work needs 15 bytes of disk for every token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_sft.data.template import ChatTemplate, read_template
from ds_sft.data.tokenizer import borrowed_template, load_backend, load_tokenizer

SAMPLE_ROWS = 2_000
SECONDS_BETWEEN = 0.25


class Speed(NamedTuple):
    tokens: int
    seconds: float
    processor_seconds: float
    """Of all processes and threads together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--chats", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000])
    parser.add_argument("--template", default="qwen3", help="qwen3, a FILE, or empty: its own")
    parser.add_argument("--packing", nargs="+", default=["next-fit", "best-fit"])
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=float, default=3.0, help="the median number of questions")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    pairs = [pair for path in args.chats for pair in read_pairs(path)]
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        for number in args.rows:
            chats = Path(work, f"{number}.jsonl")
            with chats.open("w", encoding="utf-8") as file:
                for row in itertools.islice(rows(pairs, args.turns), number):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            for packing in args.packing:
                before = encode_batch_speed(args, pairs)
                mine, fill, memory = prepare(args, chats, packing, Path(work, "data"))
                after = encode_batch_speed(args, pairs)
                report(f"{number:,} rows {packing:<9}", mine, fill, memory, [before, after])
            chats.unlink()


def read_pairs(path: Path) -> list[list[dict[str, Any]]]:
    """Each user turn with the assistant turn that answers it."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        for ask, reply in itertools.pairwise(turns):
            texts = isinstance(ask["content"], str) and isinstance(reply["content"], str)
            if (ask["role"], reply["role"]) == ("user", "assistant") and texts:
                found.append([{"role": t["role"], "content": t["content"]} for t in (ask, reply)])
    return found


def rows(pairs: list[list[dict[str, Any]]], median: float) -> Iterator[dict[str, Any]]:
    """Conversations without end, the same ones each time."""
    draw = random.Random(0)
    while True:
        number = max(1, min(100, round(draw.lognormvariate(math.log(median), 0.7))))
        yield {"messages": [turn for _ in range(number) for turn in draw.choice(pairs)]}


def encode_batch_speed(args: argparse.Namespace, pairs: list[list[dict[str, Any]]]) -> Speed:
    """The tokenizer alone, on all cores."""
    tokenizer = load_tokenizer(args.tokenizer)
    text = (
        read_template(args.template)
        if args.template
        else borrowed_template(tokenizer, args.tokenizer).template
    )
    template = ChatTemplate(text, tokenizer.special_tokens_map, "template")
    sample = itertools.islice(rows(pairs, args.turns), SAMPLE_ROWS)
    texts = [template.render(row["messages"], None) for row in sample]
    backend = load_backend(Path(args.tokenizer, "tokenizer.json"))
    started, used = time.monotonic(), time.process_time()
    tokens = sum(
        len(encoding)
        for start in range(0, len(texts), 500)
        for encoding in backend.encode_batch(texts[start : start + 500], add_special_tokens=False)
    )
    return Speed(tokens, time.monotonic() - started, time.process_time() - used)


def prepare(
    args: argparse.Namespace, chats: Path, packing: str, out: Path
) -> tuple[Speed, float, list[float]]:
    """Speed, fill, and the memory in MB at each look."""
    command = [sys.executable, "-m", "ds_sft", "prepare", "--input", str(chats), "--force"]
    command += ["--tokenizer", args.tokenizer, "--out", str(out), "--packing", packing]
    command += ["--max-seq-len", str(args.length), "--workers", str(args.workers)]
    if args.template:  # one sample a row, as the rendered texts are
        command += ["--chat-template", args.template, "--history", "levanter"]
    started, used = time.monotonic(), children_seconds()
    memory = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            memory.append(resident_mb(process.pid))
            time.sleep(SECONDS_BETWEEN)
    seconds, used = time.monotonic() - started, children_seconds() - used
    if process.returncode:
        raise SystemExit(f"error: prepare ended with {process.returncode}")
    facts = json.loads((out / "manifest.json").read_bytes())
    return Speed(facts["counts"]["tokens"], seconds, used), facts["packing"]["fill"], memory


def children_seconds() -> float:
    """Processor time of all descendants that have ended."""
    return sum(os.times()[2:4])


def resident_mb(pid: int) -> float:
    """Resident memory of a process and all its descendants; 0 for one that has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = next((line.split()[1] for line in status.splitlines() if "VmRSS" in line), "0")
    return int(own) / 1024 + sum(resident_mb(int(child)) for child in children)


def report(what: str, mine: Speed, fill: float, memory: list[float], alone: list[Speed]) -> None:
    clock, processors = (
        statistics.mean(getattr(speed, unit) / speed.tokens for speed in alone)
        * mine.tokens
        / getattr(mine, unit)
        for unit in ("seconds", "processor_seconds")
    )
    tenths = [memory[len(memory) * place // 10] for place in range(10)]
    print(
        f"{what} {mine.tokens:,} tokens, fill {fill:.2%}: {mine.seconds:.1f} s, "
        f"{mine.processor_seconds:.1f} s of processors, {mine.tokens / mine.seconds:,.0f} tok/s; "
        f"encode_batch = 1: {clock:.2f} by the clock, {processors:.2f} by processors\n"
        f"    peak {max(memory):,.0f} MB; at each tenth of the time: "
        + " ".join(f"{mb:,.0f}" for mb in tenths),
        flush=True,
    )


if __name__ == "__main__":
    main()
