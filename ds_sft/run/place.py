"""Can --out become a run directory, or go on being one? No torch.

Owns what is refused about the place itself, before anything is written: nothing here may end in a
traceback, whatever a person or an unset shell variable put there. Leaves the space that a run needs
to `plan_facts` and `saver`, who else writes there to `lock`.
"""

from __future__ import annotations

import os
from pathlib import Path

from ds_sft.errors import ConfigError
from ds_sft.run.layout import RunDir


def check_place(out: Path, data: Path, model_dir: Path | None) -> None:
    """Raise ConfigError for an --out that cannot become, or go on being, a run directory."""
    try:
        _check_name(out)
        for flag, place in (("--data", data), ("--model-id", model_dir)):
            if place is not None and out.resolve().is_relative_to(place.resolve()):
                raise ConfigError(f"--out {out} lies in {flag} {place}: name another directory")
        _check_inside(out)
        parent = existing_parent(out)
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(f"--out {out} cannot be made: {parent} is not writable")
    except (OSError, RuntimeError) as error:  # a name that is too long, a link to itself
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--out {_short(out)} cannot be used: {reason}") from None


def _check_name(out: Path) -> None:
    """Refuse what a shell makes of a variable that is not set, and what it leaves as it is."""
    run_json = RunDir(out).run_json
    if out == Path(".") and not run_json.exists() and any(out.iterdir()):
        raise ConfigError(
            "--out is empty or `.`, the current directory, which holds other things: name a "
            "directory (is a variable not set?)"
        )
    if out.parts[:1] and out.parts[0].startswith("~"):
        raise ConfigError(f"--out {out}: no shell has replaced the ~: write the directory in full")
    if "\n" in str(out):
        raise ConfigError(f"--out {str(out)!r} has a line break: name another directory")
    try:
        str(out).encode()
    except UnicodeEncodeError:  # torch would save there, and then not find what it saved
        raise ConfigError(f"--out {str(out)!r} is not UTF-8: name another directory") from None


def _check_inside(out: Path) -> None:
    """What is there already must be what a run would make, and writable."""
    inside = RunDir(out)
    for path in (out, inside.checkpoints, inside.temporary, inside.exports):
        what = f"--out {out}" if path == out else str(path)
        if path.is_symlink() and not path.exists():
            # An unmounted disk: a run that took it for an empty one would begin at step 0.
            raise ConfigError(
                f"{what} is a link to {path.readlink()}, which is not there: mount or make it"
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{what} is no directory: remove it, or use another --out")
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{what} is not writable: use another --out")
    for path in (inside.finished, inside.stop, inside.lock, inside.run_json, inside.metrics):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file: remove it, or use another --out")


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
