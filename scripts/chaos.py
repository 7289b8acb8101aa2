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
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from chaos_life import LIFE_SECONDS, ROOT, STARTED, Failed, environment, life
from chaos_phases import REQUIRED, START, STEP, Lengths, look, phase_of

sys.path.insert(0, str(ROOT))

EACH_AT_LEAST = 2
EXACT = ("label", "loss", "lr", "grad_norm", "target_tokens", "tokens")


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
