#!/usr/bin/env python3
"""Kill a training again and again, start it again each time, and compare it with a run left alone.

Owns the long proof that nothing is lost: two real ranks of the real launcher on a small model, the
launcher and every rank ended by SIGKILL at random moments of chosen phases. The code under test has
no hooks: the run directory is watched from outside, the kill is sent while the wanted phase lies
there, after a random part of that phase's usual length; where the kill really fell is read from the
disk afterwards. Every start is the same command. The end must be bit-equal to the straight run.
Leaves damage after the write (bit rot, truncation) to the tests of `verify`.

    python scripts/chaos.py --kills 100 --out chaos-run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEP, BEFORE, MARKER = "in a step", "in a save, before its rename", "at a marker"
AFTER, EXPORT = "in a save, after its rename", "in an export"
REQUIRED = (STEP, BEFORE, MARKER, AFTER, EXPORT)
START, EXPORTED = "at start-up", "after an export's rename"
EACH_AT_LEAST = 2
STARTED = b"First batch loaded"
LIFE_SECONDS = 300.0  # for one start with its steps; far more than any needs
EXACT = ("label", "loss", "lr", "grad_norm", "target_tokens", "tokens")
CHECKPOINTS = ("checkpoints", "checkpoints-temp")
MARKERS = {**dict.fromkeys(CHECKPOINTS, "meta.json"), "hf": "checksums.json"}
_NAME = re.compile(r"step-(\d+)(\.partial)?")


class Failed(Exception):
    """What was promised did not hold."""


@dataclass(frozen=True)
class Seen:
    """What lies in the run directory at one moment."""

    whole: dict[str, list[int]]
    """Labels under their final names, by folder, ascending."""
    partial: dict[str, list[int]]
    """Labels under `.partial`, by folder."""
    marked: bool
    """Whether a newest `.partial` already has its marker."""
    other: list[str]
    """Any other name."""

    @property
    def newest(self) -> int:
        """The newest label of either kind of checkpoint, -1 if there is none."""
        return max((n for folder in CHECKPOINTS for n in self.whole[folder]), default=-1)

    def __str__(self) -> str:
        names = [f"{f}/step-{n}" for f, labels in self.whole.items() for n in labels[-2:]]
        half = [f"{f}/step-{n}.partial" for f, labels in self.partial.items() for n in labels]
        return ", ".join([*names, *half, *self.other]) + (" (with marker)" if self.marked else "")


def look(out: Path) -> Seen:
    """Read the names below the run directory; they may change meanwhile."""
    whole: dict[str, list[int]] = {}
    partial: dict[str, list[int]] = {}
    other: list[str] = []
    marked = False
    for folder, marker in MARKERS.items():
        whole[folder], partial[folder] = [], []
        try:
            names = os.listdir(out / folder)
        except FileNotFoundError:
            continue
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                other.append(f"{folder}/{name}")
            else:
                (partial if match[2] else whole)[folder].append(int(match[1]))
                marked |= bool(match[2]) and (out / folder / name / marker).exists()
        whole[folder].sort()
    return Seen(whole, partial, marked, other)


def phase_of(now: Seen, at_start: Seen) -> str:
    """Where the run is, by what lies there and what lay there before its first step."""
    newest = now.newest
    if newest > at_start.newest and (
        any(n < newest for n in now.whole["checkpoints-temp"])
        or any(n < newest for folder in CHECKPOINTS for n in now.partial[folder])
    ):
        return AFTER
    if any(now.partial.values()):
        if now.marked:
            return MARKER
        return EXPORT if now.partial["hf"] else BEFORE
    exported = max(now.whole["hf"], default=-1)
    if exported > max(newest, max(at_start.whole["hf"], default=-1)):
        return EXPORTED
    return STEP


@dataclass
class Lengths:
    """How long each phase lasts, from what was watched, so that kills fall anywhere in one."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, phase: str, seconds: float) -> None:
        """Remember one whole phase; outliers of a busy machine fade."""
        known = self.seconds.get(phase, seconds)
        self.seconds[phase] = min(seconds, 2 * known) * 0.3 + known * 0.7

    def part(self, phase: str, chance: random.Random) -> float:
        """A random part of the usual length."""
        return chance.random() * self.seconds.get(phase, 0.0)


class Life:
    """One start of the run, from the launcher's birth to its death."""

    def __init__(self, command: list[str], out: Path, log: Path) -> None:
        self.out, self.log = out, log
        with log.open("wb") as console:
            self.process = subprocess.Popen(
                command, env=environment(), cwd=ROOT, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.born = time.monotonic()
        self.tree: list[psutil.Process] = []

    def said(self) -> bytes:
        """What the ranks and the launcher said so far."""
        return self.log.read_bytes()

    def check_alive(self) -> None:
        """Raise Failed if the run ended by itself, or goes on for ever."""
        code = self.process.poll()
        if code is not None:
            raise Failed(f"the run ended by itself (exit code {code}), see {self.log}")
        if time.monotonic() - self.born > LIFE_SECONDS:
            raise Failed(f"nothing to kill came in {LIFE_SECONDS:.0f} s, see {self.log}")

    def wait_for_first_step(self) -> Seen:
        """Wait until training starts; returns what lies there then."""
        while STARTED not in self.said():
            self.check_alive()
            time.sleep(0.02)
        self.tree = self.descendants()
        return look(self.out)

    def wait_in(self, target: str, skip: int, at_start: Seen, lengths: Lengths) -> None:
        """Return as soon as the run is in phase `target` for the time `skip` + 1."""
        phase, since = "", time.monotonic()
        while True:
            now = phase_of(look(self.out), at_start)
            if now != phase:
                if phase:
                    lengths.note(phase, time.monotonic() - since)
                phase, since = now, time.monotonic()
                skip -= now == target
                if skip < 0:
                    return
            self.check_alive()
            time.sleep(0.0003)

    def descendants(self) -> list[psutil.Process]:
        """Everything that the launcher started and that runs now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL to the whole process group in one call, then to whoever left the group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        for process in self.tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=30)
        _, alive = psutil.wait_procs(self.tree, timeout=30)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if alive:
            raise Failed(f"processes outlived SIGKILL: {alive}")

    def wait_for_end(self, seconds: float) -> None:
        """Let the run end by itself. Raises Failed unless it says that it finished."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.tree = self.descendants()
            self.kill()
            raise Failed(f"the run did not end in {seconds:.0f} s, see {self.log}") from None
        if code != 0 or not (self.out / "finished").is_file():
            raise Failed(f"the run failed (exit code {code}), see {self.log}")


def environment() -> dict[str, str]:
    """Two CPU ranks of one thread, whatever the machine has; nothing from the network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def make_inputs(work: Path) -> None:
    """A model of 3.7 M parameters (a state of 45 MB, so that a save takes a while) and data."""

    def run(*words: object) -> None:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Failed(f"{' '.join(command)} failed: {done.stderr[-2000:]}")

    chats, model = work / "chats.jsonl", work / "model"
    run("scripts/make_chats.py", "--out", chats, "--count", 200)
    run("scripts/make_tiny_model.py", "--chats", chats, "--out", model, "--hidden-size", 256,
        "--layers", 4, "--untied")  # fmt: skip
    run("-m", "ds_sft", "prepare", "--input", chats, "--tokenizer", model, "--max-seq-len", 512,
        "--chat-template", "qwen3", "--out", work / "data")  # fmt: skip


def command_of(work: Path, out: Path, steps: int, *more: object) -> list[str]:
    """The one command with which the run starts each time."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [
        "deepspeed", "--hostfile", "/dev/null", "--num_gpus", 2, "--master_addr", "127.0.0.1",
        "--master_port", port, "--module", "ds_sft.train", "--recipe", "qwen3-1.7b",
        "--model-id", work / "model", "--data", work / "data", "--out", out,
        "--deepspeed-config", ROOT / "ds_configs/zero3.json", "--num-train-steps", steps,
        "--train-batch-size", 4, "--learning-rate", 1e-3, "--steps-per-checkpoint", 5,
        "--steps-per-hf-export", 2, "--keep-checkpoints", 2, *more,
    ]  # fmt: skip
    return [str(word) for word in words]


def rows_of(out: Path) -> list[dict[str, object]]:
    """metrics.jsonl without a torn last line."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@contextmanager
def life(command: list[str], out: Path, log: Path) -> Iterator[Life]:
    """A life that ends with the block, whatever happens."""
    living = Life(command, out, log)
    try:
        yield living
    finally:
        if living.process.poll() is None:
            living.tree = living.descendants()
            living.kill()


def kill_once(
    command: list[str], out: Path, log: Path, target: str, lengths: Lengths, chance: random.Random
) -> str:
    """Start the run and kill it in phase `target`; returns the phase that the disk shows."""
    with life(command, out, log) as living:
        if target == START:
            time.sleep(chance.random() * lengths.seconds.get(START, 8.0))
            living.check_alive()
            living.tree = living.descendants()
            living.kill()
            if STARTED not in living.said():
                return START
            return STEP if not any(look(out).partial.values()) else "unknown: near the first step"
        at_start = living.wait_for_first_step()
        lengths.note(START, time.monotonic() - living.born)
        living.wait_in(target, chance.randrange(2), at_start, lengths)
        time.sleep(lengths.part(target, chance))
        living.kill()
        return phase_of(look(out), at_start)


def next_target(fell: Counter[str], number: int, chance: random.Random) -> str:
    """The phase with the fewest kills; each seventh kill may fall into the start."""
    if number % 7 == 0:
        return START
    fewest = min(fell[phase] for phase in REQUIRED)
    return chance.choice([phase for phase in REQUIRED if fell[phase] == fewest])


def chaos(work: Path, kills: int, steps: int, seed: int, until: float) -> Counter[str]:
    """Kill the run `kills` times and more until each phase had its share; then let it end.

    After the moment `until` no more than that share is wanted.
    """
    chance, lengths, fell = random.Random(seed), Lengths(), Counter[str]()
    out = work / "run"
    command = command_of(work, out, steps, "--temp-checkpoint-minutes", 0.0001)
    print(f"[chaos] seed {seed}: {' '.join(command)}", flush=True)
    number = 0
    while (number < kills and time.monotonic() < until) or (
        min(fell[phase] for phase in REQUIRED) < EACH_AT_LEAST
    ):
        if number == 2 * kills:
            raise Failed(f"{number} kills, and still not {EACH_AT_LEAST} in each phase: {fell}")
        number += 1
        target = next_target(fell, number, chance)
        started = time.monotonic()
        phase = kill_once(command, out, work / f"life-{number}.log", target, lengths, chance)
        fell[phase] += 1
        print(
            f"[chaos] kill {number} fell {phase} (aimed: {target}) after "
            f"{time.monotonic() - started:.1f} s; {len(rows_of(out))} rows; {look(out)}",
            flush=True,
        )
    with life(command, out, work / "life-last.log") as living:
        living.wait_for_end(LIFE_SECONDS + 2 * steps)
    return fell


def straight(work: Path, steps: int) -> None:
    """The same run, left alone and without temporary checkpoints."""
    out = work / "straight"
    command = command_of(work, out, steps, "--temp-checkpoint-minutes", 0)
    with life(command, out, work / "straight.log") as living:
        living.wait_for_end(LIFE_SECONDS + 2 * steps)


def compare(run: Path, alone: Path) -> list[str]:
    """What holds between the killed run and the straight one. Raises Failed."""
    from ds_sft.run.verify import verify

    got, want = ([[row[n] for n in EXACT] for row in rows_of(out)] for out in (run, alone))
    if got != want:
        odd = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), "end")
        raise Failed(f"metrics.jsonl differs at row {odd}: {len(got)} and {len(want)} rows")
    seen = look(run)
    if seen.whole["hf"] != look(alone).whole["hf"]:
        raise Failed(f"exports {seen.whole['hf']}, the straight run has {look(alone).whole['hf']}")
    for label in seen.whole["hf"]:
        ours, theirs = (out / f"hf/step-{label}" for out in (run, alone))
        verify(ours)
        files = sorted(path.name for path in theirs.iterdir())
        if sorted(path.name for path in ours.iterdir()) != files:
            raise Failed(f"{ours} has other files than {theirs}")
        for name in files:
            if (ours / name).read_bytes() != (theirs / name).read_bytes():
                raise Failed(f"{ours / name} has other bytes than {theirs / name}")
    if any(seen.partial.values()) or seen.other or seen.whole["checkpoints-temp"]:
        raise Failed(f"leftovers: {seen}")
    if seen.whole["checkpoints"] != look(alone).whole["checkpoints"]:
        raise Failed(f"other checkpoints than the straight run: {seen}")
    for label in seen.whole["checkpoints"]:
        verify(run / f"checkpoints/step-{label}")
    return [
        f"{len(got)} rows of metrics.jsonl are bit-equal to the straight run's",
        f"{len(seen.whole['hf'])} exports are whole and byte-equal, no leftover lies there",
    ]


def prove(work: Path, kills: int, steps: int, seed: int, minutes: float = 1e6) -> Counter[str]:
    """The whole proof below `work`; returns the kills by phase. Raises Failed."""
    began = time.monotonic()
    make_inputs(work)
    straight(work, steps)
    print(f"[chaos] the straight run took {time.monotonic() - began:.0f} s with making its data")
    fell = chaos(work, kills, steps, seed, began + 60 * minutes)
    for line in compare(work / "run", work / "straight"):
        print(f"[chaos] {line}")
    for phase, count in sorted(fell.items(), key=lambda item: -item[1]):
        print(f"[chaos] {count:4d} {phase}")
    print(f"[chaos] {fell.total()} kills survived in {time.monotonic() - began:.0f} s", flush=True)
    return fell


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a training often, compare it at the end.")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs at least")
    parser.add_argument("--minutes", type=float, default=1e6, help="no more kills after that")
    parser.add_argument("--steps", type=int, help="length of the run; default 2 per kill and 20")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills {args.kills} must be at least 1")
    if args.out.exists():
        parser.error(f"--out {args.out} exists: remove it or name another directory")
    args.out.mkdir(parents=True)
    try:
        steps = args.steps or 2 * args.kills + 20
        prove(args.out.resolve(), args.kills, steps, args.seed, args.minutes)
    except Failed as failure:
        sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
