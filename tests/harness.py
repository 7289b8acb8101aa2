"""What several tests need: the golden tiny model and data as files, and real launches.

The launches are those of a user: the `deepspeed` command, real ranks, gloo, a private port.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from ds_sft.data.packed import PackedWriter

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cpu_env(**extra: str) -> dict[str, str]:
    """The environment of a launch on this machine's cores."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **extra}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["TOKENIZERS_PARALLELISM"] = "false"
    return env


def launch_command(world_size: int, module: str = "ds_sft.train") -> list[str]:
    """`deepspeed` on this host with `world_size` ranks."""
    return [
        "deepspeed", "--num_gpus", str(world_size), "--master_port", str(free_port()),
        "--module", module,
    ]  # fmt: skip


def launch(
    world_size: int, *args: object, timeout: float = 300, module: str = "ds_sft.train", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a training through the real launcher; stdout and stderr come back as one text."""
    command = [*launch_command(world_size, module), *map(str, args)]
    return subprocess.run(
        command, env=cpu_env(**env), cwd=ROOT, text=True, timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def copy_tiny_model(to: Path, kind: str = "untied") -> Path:
    """The golden tiny Qwen3 as a Hugging Face directory with a tokenizer."""
    to.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "tiny_qwen3" / kind / name, to / name)
    shutil.copytree(GOLDEN / "tiny_tokenizer", to, dirs_exist_ok=True)
    return to


def write_golden_data(to: Path) -> Path:
    """The 28 golden packs of 64 tokens as a packed data set."""
    golden = np.load(GOLDEN / "tiny_qwen3" / "packed_data.npz")
    offsets = golden["pack_offsets"]
    with PackedWriter(to, max_seq_len=64) as writer:
        for i in range(len(golden["tokens"])):
            lengths = golden["doc_lens"][offsets[i] : offsets[i + 1]].tolist()
            used = sum(lengths)
            writer.add_pack(golden["tokens"][i, :used],
                            golden["assistant_mask"][i, :used].astype(np.uint8), lengths)  # fmt: skip
        shutil.copytree(GOLDEN / "tiny_tokenizer", writer.tokenizer_dir)
        writer.commit({"packing": "next-fit"})
    return to


def metrics(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# The recipe of golden/tiny_qwen3_train, as flags.
GOLDEN_RECIPE = {
    "--num-train-steps": 12, "--train-batch-size": 8, "--loss-groups": 2,
    "--learning-rate": 0.002, "--weight-decay": 0.1, "--warmup": 0.25, "--decay": 0.5,
    "--min-lr-ratio": 0.1, "--max-grad-norm": 1.0, "--beta1": 0.9, "--beta2": 0.999,
    "--eps": 1e-8, "--compute-dtype": "float32",
}  # fmt: skip


def flags(model: Path, data: Path, out: Path, changes: dict | None = None) -> list[object]:
    """Command-line words of a run with the golden recipe, `changes` laid over it."""
    words = {
        "--model-id": model, "--data": data, "--out": out,
        "--deepspeed-config": ROOT / "ds_configs/zero3.json", **GOLDEN_RECIPE, **(changes or {}),
    }  # fmt: skip
    pairs = [(k, v) for k, v in words.items() if v is not None]
    return [word for k, v in pairs for word in ((k,) if v is True else (k, v))]
