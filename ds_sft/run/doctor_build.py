"""What `ds-sft doctor` says about compiling: compiler, ninja, libaio and DeepSpeed's operators.

Owns these checks, which keep the invariants of `doctor_checks`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ds_sft.engine import ops
from ds_sft.run.doctor_checks import WITHOUT_NVME, Check, Kind
from ds_sft.run.place import existing_parent

WITHOUT_OFFLOAD = "or use ds_configs/zero3.json, which needs none of it"


def compiler() -> Check:
    """The C++ compiler that torch will call."""
    asked = os.environ.get("CXX", "c++")
    found = shutil.which(asked)
    if found is None:
        return Check(
            name="C++ compiler", state="FAIL", detail=f"no `{asked}` in PATH",
            advice=f"install g++ (Debian: apt-get install g++), {WITHOUT_OFFLOAD}",
            stops=("cpu", "nvme"),
        )  # fmt: skip
    return Check(name="C++ compiler", state="ok", detail=found)


def ninja() -> Check:
    """ninja, which torch runs also to find that there is nothing to build."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("ninja", path=path)
    if found is None:
        return Check(
            name="ninja", state="FAIL", detail="not in PATH, nor beside this Python",
            advice=f"pip install ninja, {WITHOUT_OFFLOAD}", stops=("cpu", "nvme"),
        )  # fmt: skip
    return Check(name="ninja", state="ok", detail=found)


def libaio() -> Check:
    """libaio's header and library, as DeepSpeed's builder will find them."""
    name = "libaio"
    if ops.is_built("async_io"):
        return Check(name=name, state="ok", detail="async_io is built with it")
    if compiler().state == "FAIL":
        return Check(name=name, state="-", detail="not looked for without a compiler")
    found = ops.builder("async_io")
    if found is None or not found.is_compatible(verbose=False):
        return Check(
            name=name, state="FAIL", detail="its headers are not found",
            advice="install them (Debian: scripts/install_nvme_deps.sh as root; elsewhere CFLAGS "
            f"and LDFLAGS name the place), {WITHOUT_NVME}",
            stops=("nvme",),
        )  # fmt: skip
    return Check(name=name, state="ok", detail="headers and library found")


def operator(op: str, *, minutes: int, stops: Kind) -> Check:
    """Whether an operator is built, or waits for a lock that nobody holds."""
    held = ops.locks(ops.extension_root(), ops.names_of([op]))
    stale = [lock for lock in held if ops.is_stale(lock)]
    if stale:
        return Check(
            name=op, state="FAIL",
            detail=f"{stale[0]} is left from a build that was killed: a run would wait for ever",
            advice="`ds-sft doctor --build` removes it and builds", stops=(stops,),
        )  # fmt: skip
    if held:
        return Check(
            name=op, state="warn", detail=f"is being built ({held[0]})", advice="wait for it"
        )
    if not ops.is_built(op):
        root = ops.extension_root()
        place = existing_parent(root)
        if not (place.is_dir() and os.access(place, os.W_OK)):
            return Check(
                name=op, state="FAIL",
                detail=f"not built, and {root} cannot be made or written to",
                advice=f"TORCH_EXTENSIONS_DIR names a directory of your own, {WITHOUT_OFFLOAD}",
                stops=(stops,),
            )  # fmt: skip
        return Check(
            name=op, state="warn",
            detail="not built by this environment; the first run that needs it will, in about "
            f"{minutes} minutes",
            advice="`ds-sft doctor --build` does it now; TORCH_EXTENSIONS_DIR, one for each "
            "environment, keeps them apart",
        )  # fmt: skip
    return Check(name=op, state="ok", detail="built")
