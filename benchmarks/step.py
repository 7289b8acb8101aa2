"""Speed of our step beside its peers, in one run, as ratios of document tokens per second.

    python benchmarks/step.py --tokenizer DIR --chats chats.jsonl [--trl]

Peers take turns, so that a machine whose speed drifts does it to all of them; the median over
rounds of each peer's median step counts. Tokens are those of documents, without padding. The model
is a Qwen3 with random weights (hidden 256, 4 layers) and the vocabulary of the tokenizer: 15.7 M
parameters with SmolLM2's 49,152 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WARMUP = 2  # steps of each run that do not count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/ds-sft-benchmark"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--trl", action="store_true", help="needs trl==1.16 and datasets")
    args = parser.parse_args()
    model, data = prepare(args)
    speeds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        speeds.setdefault("bare loop, 1 thread", []).append(bare(args, model, data))
        speeds.setdefault("ds_sft, 1 rank", []).append(ours(args, model, data, 1))
        speeds.setdefault("ds_sft, 2 ranks", []).append(ours(args, model, data, 2))
        if args.trl:
            speeds.setdefault("TRL, 1 process x 2 threads", []).append(trl(args, model, 1, 2))
            speeds.setdefault("TRL, 2 processes x 1 thread", []).append(trl(args, model, 2, 1))
        print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
    report(speeds)


def report(speeds: dict[str, list[float]]) -> None:
    """Medians, and the ratios that the README quotes."""
    median = {name: statistics.median(values) for name, values in speeds.items()}
    for name, value in median.items():
        spread = f"{min(speeds[name]):.0f} to {max(speeds[name]):.0f}"
        print(f"{name:<30} {value:8.0f} tok/s  ({spread})")
    bare_speed = median["bare loop, 1 thread"]
    print(f"1 rank  / bare loop, 1 thread  {median['ds_sft, 1 rank'] / bare_speed:.2f}")
    print(f"2 ranks / bare loop, 1 thread  {median['ds_sft, 2 ranks'] / bare_speed:.2f}")
    peers = [value for name, value in median.items() if name.startswith("TRL")]
    if peers:
        print(f"2 ranks / the better TRL       {median['ds_sft, 2 ranks'] / max(peers):.2f}")


def prepare(args: argparse.Namespace) -> tuple[Path, Path]:
    """The tiny model and the packed data, made once."""
    model, data = args.work / "model", args.work / f"data-{args.length}"
    if not model.exists():
        code = (
            "import sys, torch\n"
            "from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM\n"
            "tok = AutoTokenizer.from_pretrained(sys.argv[1]); torch.manual_seed(0)\n"
            "cfg = Qwen3Config(vocab_size=len(tok), hidden_size=256, intermediate_size=768,\n"
            "  num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,\n"
            "  tie_word_embeddings=True, max_position_embeddings=32768,\n"
            "  eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)\n"
            "Qwen3ForCausalLM(cfg).to(torch.bfloat16).save_pretrained(sys.argv[2])\n"
            "tok.save_pretrained(sys.argv[2])\n"
        )
        subprocess.run([sys.executable, "-c", code, args.tokenizer, str(model)], check=True)
    if not data.exists():
        command = [
            sys.executable, "-m", "ds_sft", "prepare", "--input", args.chats, "--tokenizer", model,
            "--max-seq-len", args.length, "--out", data,
        ]  # fmt: skip
        subprocess.run(list(map(str, command)), check=True)
    return model, data


def ours(args: argparse.Namespace, model: Path, data: Path, ranks: int) -> float:
    """Median document tokens per second of a real launch."""
    out = args.work / f"run-{ranks}"
    subprocess.run(["rm", "-rf", str(out)], check=True)
    command = [
        "deepspeed", "--num_gpus", ranks, "--master_port", free_port(), "--module", "ds_sft.train",
        "--model-id", model, "--data", data, "--out", out, "--num-train-steps", args.steps,
        "--train-batch-size", 4, "--loss-groups", 1, "--learning-rate", 1e-4,
        "--deepspeed-config", HERE.parent / "ds_configs/zero3.json", "--temp-checkpoint-minutes", 0,
    ]  # fmt: skip
    run(command, threads=1)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return median_speed([row for row in rows if "loss" in row])


def bare(args: argparse.Namespace, model: Path, data: Path) -> float:
    """The plain loop on one thread."""
    command = [
        sys.executable, HERE / "bare_loop.py", "--model", model, "--data", data,
        "--steps", args.steps,
    ]  # fmt: skip
    return median_speed(json_lines(run(command, threads=1)))


def trl(args: argparse.Namespace, model: Path, processes: int, threads: int) -> float:
    """TRL on the same chats; its tokens are packs times their fill."""
    script = [
        HERE / "trl_loop.py", "--model", model, "--chats", args.chats, "--length", args.length,
        "--steps", args.steps, "--accumulate", 4 // processes, "--out", args.work / "trl",
    ]  # fmt: skip
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", processes]
        launcher += ["--master_port", free_port()]
    rows = json_lines(run([*launcher, *script], threads=threads))
    fill = next(row["fill"] for row in rows if "fill" in row)
    tokens = 4 * args.length * fill
    return median_speed([{"tokens": tokens, **row} for row in rows if "step_time_s" in row])


def median_speed(rows: list[dict]) -> float:
    """Tokens per second of the median step, without the first ones."""
    return statistics.median(row["tokens"] / row["step_time_s"] for row in rows[WARMUP:])


def json_lines(text: str) -> list[dict]:
    """The JSON objects among the lines of an output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]


def run(command: list, threads: int) -> str:
    """Run to the end; stdout."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        list(map(str, command)), env=env, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    main()
