"""Where in its life a run was, read from the names below its run directory.

Owns the phases that `chaos` aims at and how long each usually lasts. Invariant: nothing but names
is read, so that the run under test needs no hooks and the answer is the same after a kill.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

STEP, BEFORE, MARKER = "in a step", "in a save, before its rename", "at a marker"
AFTER, EXPORT = "in a save, after its rename", "in an export"
REQUIRED = (STEP, BEFORE, MARKER, AFTER, EXPORT)
START, EXPORTED = "at start-up", "after an export's rename"
CHECKPOINTS = ("checkpoints", "checkpoints-temp")
MARKERS = {**dict.fromkeys(CHECKPOINTS, "meta.json"), "hf": "checksums.json"}
_NAME = re.compile(r"step-(\d+)(\.partial)?")


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
