"""What several tests need: the golden tiny model and data as files, and real launches.

The launches are those of a user: the `deepspeed` command, real ranks, gloo, a private port. Where
many trainings are compared, `launch_many` does the launcher's work with what is imported already.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import importer
import numpy as np
import psutil

from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A TCP port that nobody listens on right now.

    Below the range from which Linux hands out ports by itself, so that no connection of another
    launch takes it before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


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


def script_command(world_size: int, script: Path) -> list[str]:
    """`deepspeed` on this host with `world_size` ranks of a file."""
    return [*launch_command(world_size)[:-2], str(script)]


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
            mask = golden["assistant_mask"][i, :used].astype(np.uint8)
            writer.add_pack(golden["tokens"][i, :used], mask, lengths)
        shutil.copytree(GOLDEN / "tiny_tokenizer", writer.tokenizer_dir)
        writer.commit({"packing": "next-fit"})
    return to


def with_validation(data: Path, to: Path, packs: list[int]) -> Path:
    """A copy of a data set that holds some of its own packs as its validation set."""
    shutil.copytree(data, to)
    source = PackedDataset.open(data)
    with PackedWriter(to / "validation", max_seq_len=source.max_seq_len) as writer:
        for pack in packs:
            lengths = source.doc_lengths(pack)
            used = sum(lengths)
            writer.add_pack(source.tokens[pack, :used], source.assistant_mask[pack, :used], lengths)
        shutil.copytree(data / "tokenizer", writer.tokenizer_dir)
        writer.commit({"packing": "next-fit"})
    return to


def golden_trajectory(kind: str) -> list[dict]:
    """The 12 training steps that Levanter did."""
    trajectory = json.loads((GOLDEN / "tiny_qwen3_train/trajectory.json").read_text())
    return trajectory[kind]["steps"]


def plain_loss(export: Path, data: Path) -> float:
    """Mean loss of a trained token of a packed data set: transformers on one document at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    packed = PackedDataset.open(data)
    total, count = 0.0, 0
    for pack in range(packed.num_packs):
        start = 0
        row = torch.from_numpy(packed.tokens[pack].astype("int64"))
        for length in packed.doc_lengths(pack):
            with torch.no_grad():
                logits = model(input_ids=row[None, start : start + length]).logits[0].double()
            for target in range(start + 1, min(start + length + 1, packed.max_seq_len)):
                if packed.assistant_mask[pack, target]:
                    total -= float(logits[target - start - 1].log_softmax(0)[row[target]])
                    count += 1
            start += length
    return total / count


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


# Every parameter is partitioned, gathered and freed, in several buckets and sub-groups: one that is
# not fetched when it is needed fails or shows in the loss.
TIGHT = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 20000,
        "stage3_prefetch_bucket_size": 20000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 40000,
        "stage3_max_reuse_distance": 0,
        "sub_group_size": 40000,
    }
}


@dataclass(frozen=True)
class Result:
    """How one training ended."""

    out: Path
    """Its run directory."""
    codes: list[int]
    """Exit code of each rank."""
    text: str
    """What all ranks said, stdout and stderr."""

    @property
    def rows(self) -> list[dict]:
        """The optimizer steps in its metrics.jsonl."""
        return [row for row in metrics(self.out) if "loss" in row]

    @property
    def evaluations(self) -> dict[int, dict]:
        """The evaluations in its metrics.jsonl, by label; no label may have two."""
        rows = [row for row in metrics(self.out) if "eval/loss" in row]
        assert len({row["label"] for row in rows}) == len(rows)
        return {row["label"]: row for row in rows}

    def column(self, name: str) -> list[float]:
        """One field of every row."""
        return [row[name] for row in self.rows]


@dataclass(frozen=True)
class Training:
    """One training for `launch_many`."""

    args: list[object]
    """Its flags; @RANK@ in one of them becomes the rank."""
    env: dict[str, str] = field(default_factory=dict)
    """Its own environment."""
    module: str = "ds_sft.train"
    """Whose `main` it is; a file beside many_runs.py may stand in."""
    ranks: int = 0
    """How many it has; 0 = as many as the others."""


def launch_many(
    world_size: int, runs: list[Training], work: Path, *, timeout: float = 600, **env: str
) -> list[Result]:
    """Run several trainings one after the other on `world_size` ranks (see train/many_runs.py)."""
    work.mkdir(parents=True, exist_ok=True)
    spec_file = work / f"runs-{free_port()}.json"
    args = [[str(word) for word in run.args] for run in runs]
    spec = [
        {"args": words, "env": run.env, "module": run.module, "port": str(free_port()),
         "ranks": run.ranks or world_size}
        for words, run in zip(args, runs, strict=True)
    ]  # fmt: skip
    spec_file.write_text(json.dumps(spec))
    environment = cpu_env(**{"PYTHONPATH": str(ROOT), **env})
    environment.pop("PYTEST_CURRENT_TEST", None)  # another in each test
    try:
        codes = importer.of(environment).run(spec_file, timeout)
    except BaseException:
        importer.end()
        raise
    results = []
    for i, (words, of_ranks) in enumerate(zip(args, codes, strict=True)):
        text = spec_file.with_suffix(f".{i}.log").read_text()
        results.append(Result(Path(words[words.index("--out") + 1]), of_ranks, text))
    return results


def run_once(world_size: int, *args: object, work: Path) -> Result:
    """One training without its launcher, like those of `launch_many`."""
    return launch_many(world_size, [Training(list(args))], work)[0]


class Running:
    """A launch that is watched, to be killed at a chosen moment."""

    def __init__(self, world_size: int, *args: object, **env: str) -> None:
        command = [*launch_command(world_size), *map(str, args)]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, env=cpu_env(**env), cwd=ROOT, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for(self, words: str) -> None:
        """Read the console up to a line that holds `words`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return
        raise AssertionError(f"{words!r} was never said:\n{''.join(self.lines)[-4000:]}")

    def tree(self) -> list[psutil.Process]:
        """The launcher and everything that it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def kill_when(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """`kill -9` of the whole tree while `condition` holds: it is frozen first to make sure."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if condition():
                self._signal(signal.SIGSTOP)
                if condition():
                    return self.kill()
                self._signal(signal.SIGCONT)
            time.sleep(0.0005)
        raise AssertionError(f"the moment to kill never came in {timeout} s")

    def kill(self) -> None:
        """`kill -9` of the whole tree; what has ended already is fine."""
        self._signal(signal.SIGKILL)
        self.process.wait(timeout=30)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _signal(self, number: int) -> None:
        try:
            tree = self.tree()
        except psutil.NoSuchProcess:
            return
        for process in tree:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def same_files(one: Path, two: Path) -> bool:
    """Whether two flat directories hold the same names with the same bytes."""
    names = [sorted(p.name for p in folder.iterdir()) for folder in (one, two)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (two / name).read_bytes() for name in names[0]
    )


def flip_a_bit(path: Path) -> None:
    """Damage a file as a bad disk does: same size, one bit in the middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def weights(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a Hugging Face directory as float64, whatever its stored type."""
    from safetensors.torch import load_file

    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= {name: t.double().numpy() for name, t in load_file(path).items()}
    return tensors


def relative_update_error(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], start: dict[str, np.ndarray]
) -> float:
    """|got - want| / |want - start|, L2 over all parameters."""
    assert got.keys() == want.keys() == start.keys()
    off = sum(float(((got[n] - want[n]) ** 2).sum()) for n in want)
    moved = sum(float(((want[n] - start[n]) ** 2).sum()) for n in want)
    return (off / moved) ** 0.5
