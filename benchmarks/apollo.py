"""AdamW, APOLLO and APOLLO-mini: the loss after the same steps, and the memory of their states.

    python benchmarks/apollo.py compare --model DIR --train chats.jsonl --held-out more.jsonl
    python benchmarks/apollo.py memory

`compare` packs both files with `ds-sft prepare`, trains once with each optimizer through the real
launcher (one rank, float32, all else equal) and prints the held-out loss of a trained token as
training's own evaluation says it. `--rates` gives learning rates in the order of the optimizers.
The default gives APOLLO on SmolLM2-135M (hidden size 576) updates of about AdamW's size: at rank
256 its own are smaller by the root of 256 / 576. `memory` counts bytes from the parameter lists of
Qwen3; nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from fit_table import MODELS

from ds_sft.data.architectures import expected_shapes
from ds_sft.recipe import low_rank
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import OPTIMIZERS

GIB = 2**30
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("memory")
    compare = commands.add_parser("compare")
    compare.add_argument("--model", required=True)
    compare.add_argument("--train", type=Path, required=True)
    compare.add_argument("--held-out", type=Path, required=True)
    compare.add_argument("--work", type=Path, default=Path("/tmp/ds-sft-apollo"))
    compare.add_argument("--steps", type=int, default=40)
    compare.add_argument("--every", type=int, default=20, help="steps between evaluations")
    compare.add_argument("--length", type=int, default=256)
    compare.add_argument("--batch", type=int, default=4)
    compare.add_argument("--rates", type=float, nargs=3, default=[1e-4, 1.5e-4, 1e-4])
    compare.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.command == "memory":
        memory_table()
        return
    prepare(args)
    rows = [trained(args, name, lr) for name, lr in zip(OPTIMIZERS, args.rates, strict=True)]
    labels = sorted(rows[0][2])
    print("| optimizer | learning rate | " + " | ".join(f"step {n + 1}" for n in labels)
          + " | seconds a step |")  # fmt: skip
    print("| --- |" + " --- |" * (len(labels) + 2))
    for name, lr, losses, seconds in rows:
        cells = " | ".join(f"{losses[label]:.4f}" for label in labels)
        print(f"| {name} | {lr:g} | {cells} | {seconds:.1f} |")


def prepare(args: argparse.Namespace) -> None:
    """Both files as a packed data set with its validation part, once."""
    if (args.work / "data/manifest.json").exists():
        return
    command = [
        sys.executable, "-m", "ds_sft", "prepare", "--input", args.train, "--tokenizer", args.model,
        "--validation-input", args.held_out, "--max-seq-len", args.length,
        "--out", args.work / "data",
    ]  # fmt: skip
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT)


def trained(
    args: argparse.Namespace, name: str, lr: float
) -> tuple[str, float, dict[int, float], float]:
    """Name, learning rate, held-out loss by label, and median seconds of a step."""
    out = args.work / f"{name}-{lr:g}-{args.steps}"
    if not (out / "finished").exists():
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [
            "deepspeed", "--num_gpus", 1, "--master_port", port, "--module", "ds_sft.train",
            "--model-id", args.model, "--data", args.work / "data", "--out", out,
            "--optimizer", name, "--learning-rate", lr, "--num-train-steps", args.steps,
            "--train-batch-size", args.batch, "--loss-groups", 1, "--per-device-batch", args.batch,
            "--weight-decay", 0, "--warmup", 0.1, "--decay", 0.9, "--compute-dtype", "float32",
            "--eval-every", args.every, "--steps-per-hf-export", 10**6, "--recompute-every", 0,
            "--steps-per-checkpoint", 10**6, "--temp-checkpoint-minutes", 0, "--resume", "auto",
        ]  # fmt: skip
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(args.threads)}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        started = time.monotonic()
        subprocess.run([str(word) for word in command], check=True, env=env, cwd=ROOT)
        print(f"{name}: {time.monotonic() - started:.0f} s in all", flush=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {row["label"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    times = sorted(row["step_time_s"] for row in rows if "loss" in row)
    return name, lr, losses, times[len(times) // 2]


def memory_table() -> None:
    """Moments, and all states with them, of one GPU: weights 2, gradients 4, masters 4 bytes."""
    worlds = (1, 8)
    heads = [f"{what}, {n} GPU{'s' * (n > 1)}" for n in worlds for what in ("moments", "states")]
    print("| model | optimizer | " + " | ".join(heads) + " |")
    print("| --- | --- |" + " --- |" * len(heads))
    for model in ("1.7B", "4B", "8B"):
        shapes = expected_shapes(MODELS[model], MODELS[model]["tie_word_embeddings"])
        tensors = low_rank.by_name(shapes)
        for name in OPTIMIZERS:
            settings = RECIPES["qwen3-8b"].replace(optimizer=name).apollo
            cells = []
            for world in worlds:
                moments = low_rank.state_bytes(tensors, settings.rank if settings else 0, world)
                states = moments + 10 * sum(-(-t.numel // world) for t in tensors.values())
                cells += [f"{moments / GIB:.2f}", f"{states / GIB:.1f}"]
            print(f"| {model} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
