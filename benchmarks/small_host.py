"""A real model on a host that is too small for it: SmolLM2-135M with its state on a disk.

    python benchmarks/small_host.py --model smollm2-135m --nvme-path DIR [--limit-gb 3.6]

Three trainings on one CPU rank: `zero3.json` without a limit; the same within --limit-gb of memory,
which must run out; and `zero3_offload_nvme.json` (optimizer and weights in swap files) within it.
Both files have the smallest sizes for the model, as `ds-sft fit --write` makes them. The limit is a
memory cgroup (version 1 or 2) of its own, so this needs root. Exits with 1 unless the second fails
and the losses of the first and third are within --tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ds_sft.data.model_files import read_model
from ds_sft.engine.config import read_json
from ds_sft.engine.setup import Setup
from ds_sft.engine.tuning import tuned

ROOT = Path(__file__).parents[1]
CGROUPS = Path("/sys/fs/cgroup")
KILLED = -9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="made by scripts/save_smollm2.py")
    parser.add_argument("--nvme-path", type=Path, required=True)
    parser.add_argument("--limit-gb", type=float, default=3.6, help="1e9 bytes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="small-host-") as folder:
        return compare(args, Path(folder))


def compare(args: argparse.Namespace, work: Path) -> int:
    """Run the three trainings and print what they did."""
    data = make_data(args.model, work)
    runs = [
        ("plain", "zero3", 0.0),
        ("plain, limited", "zero3", args.limit_gb),
        ("NVMe, limited", "zero3_offload_nvme", args.limit_gb),
    ]
    losses: dict[str, list[float]] = {}
    codes: dict[str, int] = {}
    for name, config, limit in runs:
        out = work / name.replace(", ", "-")
        codes[name] = train(args, sized(args.model, config, work), data, out, limit)
        metrics = out / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        rows = [json.loads(line) for line in lines]
        losses[name] = [row["loss"] for row in rows]
        peak = f", {rows[-1]['peak_memory_gb']:.2f} GB resident at the peak" if rows else ""
        seconds = f", {rows[-1]['step_time_s']:.1f} s a step" if rows else ""
        limited = f"limit {limit:g} GB" if limit else "no limit"
        print(f"{name} ({config}, {limited}): exit {codes[name]}, losses {losses[name]}{peak}"
              f"{seconds}", flush=True)  # fmt: skip
    one, two = losses["plain"], losses["NVMe, limited"]
    apart = max((abs(a - b) for a, b in zip(one, two, strict=False)), default=math.inf)
    print(f"largest difference of a loss: {apart:.1e}")
    good = len(one) == len(two) == args.steps and apart <= args.tolerance
    return 0 if good and codes["plain, limited"] == KILLED else 1


def make_data(model: Path, work: Path) -> Path:
    """Packs of 256 tokens."""
    chats, data = work / "chats.jsonl", work / "data"
    made = [ROOT / "scripts/make_chats.py", "--out", chats, "--count", 60, "--no-tools"]
    packed = ["-m", "ds_sft", "prepare", "--input", chats, "--tokenizer", model, "--max-seq-len",
              256, "--out", data, "--workers", 1]  # fmt: skip
    for words in (made, packed):
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT,
                       stdout=subprocess.DEVNULL)  # fmt: skip
    return data


def sized(model: Path, name: str, work: Path) -> Path:
    """A shipped file with the smallest sizes for the model."""
    files = read_model(model)
    setup = Setup(
        numels={n: math.prod(shape) for n, (shape, _) in files.tensors.items()}, tied=files.tied,
        world_size=1, gpus_per_node=1, compute_bytes=4, reduce_bytes=4,
    )  # fmt: skip
    path = work / f"{name}.json"
    shipped = read_json(ROOT / f"ds_configs/{name}.json")
    path.write_text(json.dumps(tuned(shipped, setup, roomy=False)))
    return path


def train(args: argparse.Namespace, config: Path, data: Path, out: Path, limit_gb: float) -> int:
    """Exit code of one training, within a limit if there is one."""
    words = [
        "--model-id", args.model, "--data", data, "--out", out, "--deepspeed-config", config,
        "--compute-dtype", "float32", "--num-train-steps", args.steps, "--train-batch-size", 2,
        "--learning-rate", 2e-5, "--temp-checkpoint-minutes", 0,
    ]  # fmt: skip
    words += ["--nvme-path", args.nvme_path] if "nvme" in config.name else []
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "ds_sft", "train", *map(str, words)]
    with limited(limit_gb) as enter, (out.parent / f"{out.name}.log").open("w") as log:
        code = subprocess.run(
            command, env=env, cwd=ROOT, stdout=log, stderr=log, preexec_fn=enter, check=False
        ).returncode
    if code not in (0, KILLED):
        print((out.parent / f"{out.name}.log").read_text()[-3000:])
    return code


@contextlib.contextmanager
def limited(limit_gb: float) -> Iterator[object]:
    """A function that brings the process that calls it into a memory cgroup of this size."""
    if not limit_gb:
        yield None
        return
    old = (CGROUPS / "memory/memory.limit_in_bytes").exists()
    group = (CGROUPS / "memory" if old else CGROUPS) / f"ds-sft-small-host-{os.getpid()}"
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if old else "memory.max"
        (group / limit).write_text(str(int(limit_gb * 1e9)))
    except OSError as error:
        raise SystemExit(
            f"error: no memory cgroup can be made ({error}): run this as root"
        ) from None
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


if __name__ == "__main__":
    sys.exit(main())
