"""`ds-sft fit --probe STEPS`: the fastest candidates run for real, on this machine.

Owns the choice of candidates, their data, the launches and what they measured. Invariants: a
candidate that runs out of memory is a row, not the end; whatever happens (Ctrl-C, a kill) no
process, no data and no swap file stays. One rank is `fit_rank`'s. No torch but to count devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_sft.data.packed_writer import PackedWriter
from ds_sft.engine.host_memory import device
from ds_sft.engine.memory import Need
from ds_sft.engine.rates import Rates
from ds_sft.errors import ConfigError
from ds_sft.fit_question import Machine, Question
from ds_sft.fit_rows import Row, best_of_each, gib

CANDIDATES = 3
KILLED = (-signal.SIGKILL, 256 - signal.SIGKILL)  # as Python and as DeepSpeed's launcher say it
HELD = "held"  # by this process, as long as it lives
_PATIENCE_SECONDS = 40.0  # the launcher gives its ranks 30 to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A candidate, and how it did."""

    row: Row
    """What was predicted."""
    config: dict[str, Any]
    """The JSON, with sizes for this model."""
    predicted_peak: int
    """What the peak was predicted to be, counted as it is measured."""
    peak: int | None
    """Bytes of the fullest rank: allocated on its GPU, or resident on a CPU; None = it failed."""
    seconds: float | None
    """Median of the steps after the first."""
    problem: str
    """Why it cannot be used; empty when it ran and fits."""


def probe(
    question: Question,
    jsons: Mapping[str, dict[str, Any]],
    machine: Machine,
    machine_rates: Rates,
) -> list[Probed]:
    """Run the fastest candidates that fit. Raises ConfigError where none can run here."""
    check_device(question.flags.world_size)
    chosen = best_of_each(question, jsons, machine, machine_rates)[:CANDIDATES]
    if not chosen:
        raise ConfigError(
            f"--probe {question.flags.probe}: nothing fits as asked; leave --probe out to see what "
            "would make it fit"
        )
    weights = "random weights" if without_weights(question) else "the model's weights"
    _say(f"up to {len(chosen)} candidates, {question.flags.probe} steps each, {weights}")
    try:
        return _probe(question, chosen, machine)
    except OSError as error:
        raise ConfigError(
            f"--probe cannot write its files ({error}): make room, or name another place with "
            "TMPDIR or --nvme-path"
        ) from None


def _probe(
    question: Question, chosen: list[tuple[Row, dict[str, Any]]], machine: Machine
) -> list[Probed]:
    results = []
    with (
        ending_in_order(),
        tempfile.TemporaryDirectory(prefix="ds-sft-probe-") as work,
        held(Path(work) / HELD),
    ):
        write_data(question, Path(work) / "data")
        for found, config in chosen:
            _say(f"{found.name} with sizes for this model")
            result = within(_run(question, found, config, Path(work)), machine)
            _say(result.problem or f"{result.seconds:.3g} s a step")
            results.append(result)
    return results


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end this process as Ctrl-C does: it cleans up."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock for as long as this process lives: the ranks end when it is free."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def within(probed: Probed, machine: Machine) -> Probed:
    """`probed`, with a problem if it took more than the GPU asked about has (this one has more)."""
    if probed.peak is None or on_cpu():
        return probed
    whole = probed.peak + probed.row.need.gpu.slack
    if whole <= machine.gpu_memory:
        return probed
    return dataclasses.replace(probed, problem=f"{gib(whole)} with the CUDA context is too much")


def fastest(probed: list[Probed]) -> Probed | None:
    """The fastest that ran and fits; None when there is none."""
    ran = [p for p in probed if not p.problem]
    return min(ran, key=lambda p: p.seconds or 0.0) if ran else None


def on_cpu() -> bool:
    """Whether the ranks of a probe run on the CPU, because the person said so."""
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def check_device(world_size: int) -> None:
    """Raise ConfigError unless this machine is the one that the question is about."""
    if on_cpu():
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(
            "--probe runs on the GPUs that the answer is for, and this machine has none: run it "
            "there, or set DS_ACCELERATOR=cpu to run --world-size ranks on the CPU"
        )
    if world_size > count:
        raise ConfigError(
            f"--probe with --world-size {world_size}: this machine has {count} GPUs: use "
            f"--world-size {count}, or leave --probe out"
        )


def without_weights(question: Question) -> bool:
    """Whether only the config.json of the model is there."""
    return not any(question.model.directory.glob("*.safetensors"))


def write_data(question: Question, path: Path) -> None:
    """Packs of the asked length, each one document that is trained whole: the slowest case."""
    flags, random = question.flags, np.random.default_rng(0)
    length, mask = flags.max_seq_len, np.ones(flags.max_seq_len, np.uint8)
    with PackedWriter(path, length) as writer:
        for _ in range(flags.world_size * flags.per_device_batch):
            tokens = random.integers(0, question.model.vocab_size, length)
            writer.add_pack(tokens, mask, [length])
        writer.commit({"packing": "none"})


def _run(question: Question, found: Row, config: dict[str, Any], work: Path) -> Probed:
    """One candidate through DeepSpeed's launcher."""
    flags = question.flags
    with _swap_directory(flags.nvme_path, config) as swap:
        spec = {
            "data": str(work / "data"), "model": str(question.model.directory),
            "random_weights": without_weights(question), "steps": flags.probe,
            "recipe": dataclasses.asdict(question.recipe), "config": config, "name": found.name,
            "nvme_path": swap, "result": str(work / found.name), "held": str(work / HELD),
            "run": {
                "per_device_batch": flags.per_device_batch, "mlp_tiles": flags.mlp_tiles,
                "loss_chunk_size": flags.loss_chunk_size,
                "recompute_every": flags.recompute_every,
                "offload_activations": flags.offload_activations,
            },
        }  # fmt: skip
        spec_file, log = work / f"{found.name}.spec", work / f"{found.name}.log"
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        code = _launch(flags.world_size, spec_file, log)
    peak = predicted_peak(found.need, min(flags.gpus_per_node, flags.world_size))
    return _read(found, config, peak, work / found.name, code)


@contextlib.contextmanager
def _swap_directory(path: Path | None, config: dict[str, Any]) -> Iterator[str | None]:
    """A directory for the swap files of one candidate, which goes with them."""
    zero = config["zero_optimization"]
    if path is None or "nvme" not in (device(zero, "offload_optimizer"),
                                      device(zero, "offload_param")):  # fmt: skip
        yield None
        return
    made = tempfile.mkdtemp(prefix="ds-sft-probe-", dir=path)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _launch(world_size: int, spec: Path, log: Path) -> int:
    """Exit code of `deepspeed` on this host; nothing that it started outlives this call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(world_size),
        "--hostfile", str(spec.with_name("no-hostfile")), "--master_port", str(port),
        "--no_local_rank", "--module", "ds_sft.fit_rank", str(spec),
    ]  # fmt: skip
    with log.open("w") as out:
        # A session of its own: Ctrl-C comes to this process, which then ends the others in order.
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            return process.wait()
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_PATIENCE_SECONDS)


def predicted_peak(need: Need, ranks_of_a_node: int) -> int:
    """Of `need`, what an allocator counts: no CUDA context; on a CPU, host memory and "GPU"."""
    tensors = need.gpu.total - need.gpu.slack
    return tensors + (need.host // ranks_of_a_node if on_cpu() else 0)


def _read(found: Row, config: dict[str, Any], expected: int, base: Path, code: int) -> Probed:
    """What a candidate's ranks left."""
    said = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(base.parent.glob(f"{base.name}.rank*.json"))
    ]
    problem = next((s["problem"] for s in said if s["problem"]), "")
    if not problem and code in KILLED:
        problem = "out of memory (a rank was killed by signal 9, as the kernel does then)"
    if not problem and (code or not said):
        problem = f"failed: {_last_words(Path(f'{base}.log'))}"
    return Probed(
        row=found, config=config, problem=problem, predicted_peak=expected,
        peak=None if problem else max(s["peak"] for s in said),
        seconds=None if problem else statistics.median(said[0]["seconds"][1:]),
    )  # fmt: skip


def _last_words(log: Path) -> str:
    """The last error; without one, the last line that is not the launcher's own."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if "[launch.py:" not in line]
    errors = [line for line in own if line.startswith(("error: ", "Fatal Python error: "))]
    last = ([*lines[-1:], *own[-1:], *errors[-1:]] or ["nothing was said"])[-1]
    return last.removeprefix("error: ")[:300]


def _say(line: str) -> None:
    print(f"[probe] {line}", file=sys.stderr, flush=True)
