"""Speed of the offloaded optimizer step: GB/s of DeepSpeed's CPU Adam beside those of the memory.

    python benchmarks/optimizer.py [--threads 1 2] [--parameters 32000000] [--rounds 7]

Each number of threads has a process of its own, since OpenMP reads it once. In a process Adam and
three plain passes over as much memory take turns (copy, triad, scaling in place), so that a machine
whose speed drifts does it to all of them; the ratio of a round is Adam over the fastest of the
three, and the median over rounds counts. Adam reads parameter, gradient and two moments and writes
all but the gradient: 28 bytes a parameter. Bytes are those that the code names: a line that the
processor reads before it overwrites it is not counted.

Exits with 1 when a ratio is below --at-least (0.5: at most half of the bandwidth is left unused).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

ADAM_BYTES = 7 * 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parameters", type=int, default=32_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-least", type=float, default=0.5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.parameters, args.rounds)))
        return 0
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    worst = 1e9
    for threads in args.threads:
        result = child(threads, args)
        adam, memory = result["adam"], result["memory"]
        print(
            f"{threads} thread{'s' if threads > 1 else ' '}: Adam {adam:6.2f} GB/s "
            f"({adam / ADAM_BYTES:.3f} G parameters/s), memory {memory:6.2f} GB/s "
            f"({result['fastest']}), ratio {result['ratio']:.2f} "
            f"({result['lowest']:.2f} to {result['highest']:.2f})",
            flush=True,
        )
        worst = min(worst, result["ratio"])
    return 0 if worst >= args.at_least else 1


def child(threads: int, args: argparse.Namespace) -> dict:
    """The measurements of a process with so many threads."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{env['PATH']}"
    words = ["--child", "--parameters", args.parameters, "--rounds", args.rounds]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words)], env=env, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the measurement failed:\n{done.stderr[-2000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def measure(num_parameters: int, rounds: int) -> dict:
    """GB/s of Adam and of the memory, medians over rounds, and the ratio of each round."""
    import torch

    from ds_sft.engine.cpu_adam import cpu_adam

    weight = torch.nn.Parameter(torch.randn(num_parameters))
    weight.grad = torch.randn(num_parameters)
    optimizer = cpu_adam([{"params": [weight]}], 1e-4, (0.9, 0.999), 1e-8)
    a, b, c = (torch.randn(num_parameters) for _ in range(3))
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "adam": (optimizer.step, ADAM_BYTES),
        "copy": (lambda: a.copy_(b), 8),
        "triad": (lambda: torch.add(b, c, alpha=1.5, out=a), 12),
        "scale": (lambda: a.mul_(1.0000001), 8),
    }
    for run, _ in passes.values():  # the first step makes the moments
        run()
    speeds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, (run, size) in passes.items():
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
            speeds[name].append(size * num_parameters / seconds / 1e9)
    plain = [name for name in passes if name != "adam"]
    fastest = max(plain, key=lambda name: statistics.median(speeds[name]))
    memory = [max(speeds[name][i] for name in plain) for i in range(rounds)]
    ratios = [adam / best for adam, best in zip(speeds["adam"], memory, strict=True)]
    return {
        "adam": statistics.median(speeds["adam"]),
        "memory": statistics.median(memory),
        "fastest": fastest,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


if __name__ == "__main__":
    sys.exit(main())
