"""`ds-sft prepare` beside TRL's preparation of the same chats, in one run.

    python benchmarks/prepare_trl.py --tokenizer DIR --chats a.jsonl --template FILE [--rows 50000]

TRL: what its SFTTrainer does with a data set before it trains with packing and a loss on the
assistant alone (the trainer's own method: tokenize with masks, build labels, pack by best fit), on
as many processes as ours; --bare leaves out all but the map of `apply_chat_template` with masks and
`pack_dataset`. Both from the file to a data set on the disk, with their imports; TRL's work alone
(without imports, reading and saving, which ours always has) is a second ratio. Each runs in a
process of its own; they take turns. The template needs `{% generation %}` marks, and the number of
tokens and of trained tokens must be the same: otherwise the comparison is refused.
Seconds of processors are of all processes together; on a busy machine their ratio is steadier.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--template", type=Path, required=True, help="a FILE with marks")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--side", choices=("ours", "trl"), help="run one of the two and stop")
    args = parser.parse_args()
    if args.side:
        result = ours(args) if args.side == "ours" else theirs(args)
        print(json.dumps(result), flush=True)
        return
    with tempfile.TemporaryDirectory() as work:
        lines = args.chats.read_bytes().splitlines(keepends=True)
        many = Path(work, "chats.jsonl")
        many.write_bytes(b"".join((lines * -(-args.rows // len(lines)))[: args.rows]))
        results = [(run("ours", args, many), run("trl", args, many)) for _ in range(args.rounds)]
    report(results)


def run(side: str, args: argparse.Namespace, chats: Path) -> dict[str, float]:
    """One side in a process of its own."""
    given = ["tokenizer", "template", "length", "workers"]
    flags = [word for name in given for word in (f"--{name}", str(getattr(args, name)))]
    flags += ["--bare"] if args.bare else []
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--side", side, "--chats", str(chats), *flags],
            env={**os.environ, "HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            check=True,
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def ours(args: argparse.Namespace) -> dict[str, float]:
    started, used = time.monotonic(), processor_seconds()
    from ds_sft.data import prepare

    with tempfile.TemporaryDirectory() as work:
        flags = prepare.PrepareFlags(
            input=(args.chats,),
            tokenizer=args.tokenizer,
            out=Path(work, "data"),
            max_seq_len=args.length,
            chat_template=str(args.template),
            packing="best-fit",
            workers=args.workers,
        )
        prepare.run(flags)
        seconds, used = time.monotonic() - started, processor_seconds() - used
        facts = json.loads(Path(work, "data", "manifest.json").read_bytes())
    counts = facts["counts"]
    return {
        "seconds": seconds,
        "processor_seconds": used,
        "tokens": counts["tokens"],
        "trained": counts["trained_tokens"],
        "fill": facts["packing"]["fill"],
    }


def theirs(args: argparse.Namespace) -> dict[str, float]:
    begun, spent = time.monotonic(), processor_seconds()
    import datasets
    import trl
    from transformers import AutoTokenizer

    for name in ("SFTConfig", "SFTTrainer", "pack_dataset"):
        getattr(trl, name)  # a lazy module: imported before the clock starts
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.chat_template = args.template.read_text(encoding="utf-8")
    rows = datasets.load_dataset("json", data_files=str(args.chats), split="train")
    prepare = bare if args.bare else as_trainer
    started, used = time.monotonic(), processor_seconds()
    packed = prepare(rows, tokenizer, args)
    work, work_used = time.monotonic() - started, processor_seconds() - used
    with tempfile.TemporaryDirectory() as directory:
        packed.save_to_disk(directory)
    seconds, used = time.monotonic() - begun, processor_seconds() - spent
    tokens = sum(len(ids) for ids in packed["input_ids"])
    trained = (
        sum(map(sum, packed["assistant_masks"]))
        if args.bare
        else sum(label != -100 for labels in packed["labels"] for label in labels)
    )
    return {
        "seconds": seconds,
        "processor_seconds": used,
        "work": work,
        "work_processors": work_used,
        "tokens": tokens,
        "trained": trained,
        "fill": tokens / (len(packed) * args.length),
    }


def bare(rows, tokenizer, args: argparse.Namespace):
    from trl import pack_dataset

    encoded = rows.map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=args.workers,
        remove_columns=rows.column_names,
    )
    return pack_dataset(encoded, args.length, "bfd", {"num_proc": args.workers})


def _tokenize(row: dict, tokenizer) -> dict[str, list[int]]:
    encoded = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return {name: encoded[name] for name in ("input_ids", "assistant_masks")}


def as_trainer(rows, tokenizer, args: argparse.Namespace):
    """The trainer's method without a trainer, which would need a model."""
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as work:
        config = SFTConfig(
            output_dir=work, max_length=args.length, packing=True, assistant_only_loss=True,
            dataset_num_proc=args.workers, use_cpu=True, bf16=False, report_to="none",
        )  # fmt: skip
        trainer = SimpleNamespace(
            chat_template=tokenizer.chat_template, completion_only_loss=False, _tokenizer=tokenizer
        )
        return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, config, True, None, "chats")


def processor_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(os.times()[:4])


def report(results: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Print both speeds and their ratio. Raises SystemExit when they did different work."""
    for mine, other in results:
        if (mine["tokens"], mine["trained"]) != (other["tokens"], other["trained"]):
            raise SystemExit(f"error: not the same tokens: ours {mine}, TRL {other}")
    for name, side in (("ds-sft prepare", 0), ("TRL", 1)):
        seconds = statistics.median(pair[side]["seconds"] for pair in results)
        facts = results[0][side]
        print(
            f"{name:<24}{facts['tokens'] / seconds:12,.0f} tok/s  {seconds:7.2f} s  "
            f"{facts['processor_seconds']:7.2f} s of processors  "
            f"{facts['tokens']:,.0f} tokens, {facts['trained']:,.0f} trained, "
            f"fill {facts['fill']:.2%}"
        )
    for what, wall, processors in (
        ("whole", "seconds", "processor_seconds"),
        ("TRL's work alone", "work", "work_processors"),
    ):
        clock = statistics.median(other[wall] / mine["seconds"] for mine, other in results)
        cpu = statistics.median(
            other[processors] / mine["processor_seconds"] for mine, other in results
        )
        print(f"ratio ({what}) {clock:.2f} by the clock, {cpu:.2f} by processors")


if __name__ == "__main__":
    main()
