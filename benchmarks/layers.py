"""Step time and peak memory of each choice for the layers, as ratios to the default.

    python benchmarks/layers.py [--length 4096] [--rounds 3] [--device cuda]

One process for each choice: forward and backward of one row of a Qwen3 with random weights, without
DeepSpeed. Choices take turns, the median over rounds counts. The peak is what the step adds to the
resident memory on a CPU, and what is allocated on a GPU; weights and gradients are outside of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

CHOICES: dict[str, dict[str, Any]] = {
    "every layer recomputed": {},
    "every 2nd": {"recompute_every": 2},
    "every 4th": {"recompute_every": 4},
    "none": {"recompute_every": 0},
    "inputs in host memory": {"offload_activations": True},
    "MLP tiles auto": {"mlp_tiles": "auto"},
    "none, MLP tiles auto": {"recompute_every": 0, "mlp_tiles": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--liger", action="store_true", help="also with Liger's kernels (a GPU)")
    parser.add_argument("--one", help="used by the program itself")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args, json.loads(args.one))))
        return
    # One thread, and what is freed goes back at once, so that the peak is what was in use.
    small = "65536"
    env = {"MALLOC_MMAP_THRESHOLD_": small, "MALLOC_TRIM_THRESHOLD_": small}
    env = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
    choices = CHOICES | ({"Liger": {"liger": True}} if args.liger else {})
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in choices}
    for _ in range(args.rounds):
        for name, choice in choices.items():
            words = [sys.executable, *sys.argv, "--one", json.dumps(choice)]
            done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
            results[name].append(tuple(json.loads(done.stdout.splitlines()[-1])))
    median = {
        n: [statistics.median(column) for column in zip(*r, strict=True)]
        for n, r in results.items()
    }
    base_time, base_peak = median["every layer recomputed"]
    for name, (seconds, peak) in median.items():
        print(
            f"{name:<24} {seconds:7.2f} s {peak / 2**20:8.0f} MiB   "
            f"time {seconds / base_time:.2f}   peak {peak / base_peak:.2f}"
        )


def measure(args: argparse.Namespace, choice: dict[str, Any]) -> tuple[float, int]:
    """Median seconds of a step and the bytes of its peak."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ds_sft.model import attention, layers
    from ds_sft.model.layers import LayerChoices
    from ds_sft.model.sft import DeviceBatch, SftModel

    device = torch.device(args.device)
    attention.register("sdpa")
    config = Qwen3Config(
        hidden_size=args.hidden, intermediate_size=3 * args.hidden, head_dim=64, vocab_size=1024,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128), attn_implementation=attention.NAME,
    )  # fmt: skip
    causal_lm = Qwen3ForCausalLM(config).to(device, torch.bfloat16)
    layers.apply(causal_lm, LayerChoices(**choice), device)
    model = SftModel(causal_lm, 512).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lengths = [512] * (args.length // 512)
    total = sum(lengths)
    ids = torch.randint(0, 1024, (1, total), device=device)
    batch = DeviceBatch(
        input_ids=ids, position_ids=torch.arange(total, device=device)[None],
        positions=torch.arange(total, device=device), labels=ids[0],
        cu_seq_lens=torch.arange(0, total + 1, 512, dtype=torch.int32, device=device),
        segment_lengths=lengths, max_length=512,
    )  # fmt: skip
    # Of the processor, which does not count what other programs take from a shared machine.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    before, seconds = memory(device), []
    for _ in range(args.steps):
        start = clock()
        model(batch).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds), memory(device) - before


def memory(device: Any) -> int:
    """Peak of this process so far, in bytes."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
