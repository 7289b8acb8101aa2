"""Names inside a run directory. Invariant: every path of a run is spelled here and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory `--out` of one run."""

    root: Path
    """--out."""

    @property
    def run_json(self) -> Path:
        """Everything needed to run this again."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def finished(self) -> Path:
        """The marker that the run reached its last step."""
        return self.root / "finished"

    @property
    def stop(self) -> Path:
        """Touch it to stop the run after saving."""
        return self.root / "stop"

    @property
    def lock(self) -> Path:
        """Who writes here, and a beat that says it is alive."""
        return self.root / "lock"

    @property
    def checkpoints(self) -> Path:
        """Permanent native checkpoints."""
        return self.root / "checkpoints"

    @property
    def temporary(self) -> Path:
        """Temporary native checkpoints, at most one."""
        return self.root / "checkpoints-temp"

    @property
    def exports(self) -> Path:
        """Hugging Face exports."""
        return self.root / "hf"


def step_dir(parent: Path, label: int) -> Path:
    """`parent/step-<label>`."""
    return parent / f"step-{label}"


def checkpoints_in(parent: Path, replaced_suffix: str) -> dict[int, Path]:
    """Directory by label, also where a kill left a label only its name while being replaced."""
    found = {label: step_dir(parent, label) for label in labels_in(parent)}
    for path in parent.glob(f"step-*{replaced_suffix}"):
        match = _STEP.fullmatch(path.name.removesuffix(replaced_suffix))
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    return found


def labels_in(parent: Path) -> list[int]:
    """Labels of the whole `step-N` directories in `parent`, ascending; `.partial` ones are none."""
    if not parent.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in parent.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)
