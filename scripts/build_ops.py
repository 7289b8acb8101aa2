#!/usr/bin/env python3
"""Build DeepSpeed's compiled operators once, in this one process, before anything needs them.

Owns the trap around their locks. An operator is compiled at its first use and kept in torch's
extension cache, behind a lock file; a build that was killed leaves that file, and every later run
then waits on it for ever without a word. So locks that nobody holds are removed here.
Assumes that the cache belongs to this machine alone: on a shared home directory set
TORCH_EXTENSIONS_DIR to a local folder.

    python scripts/build_ops.py cpu_adam
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
}
NEEDS = {"async_io": "install libaio's headers (scripts/install_nvme_deps.sh, as root)"}
# A builder takes the lock a moment before its compiler starts: a younger lock may be in use.
STALE_AFTER_SECONDS = 60.0


def extension_root() -> Path:
    """Folder that holds torch's compiled extensions; those of one Python lie one level deeper."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def is_being_built(folder: Path) -> bool:
    """Is a process of this machine working in `folder`, as ninja and the compiler do?"""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve().is_relative_to(folder.resolve()):
                return True
        except OSError:
            continue  # the process ended, or belongs to another user
    return False


def clear_stale_locks(root: Path, names: set[str], stale_after: float) -> list[Path]:
    """Remove the locks of the operators `names` that no build holds; wait for those in use.

    Returns the removed paths. Waits as long as a build goes on, and says so.
    """
    removed: list[Path] = []
    locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    for lock in sorted(path for path in locks if path.parent.name in names):
        announced = False
        while lock.exists():
            age = time.time() - lock.stat().st_mtime
            if age > stale_after and not is_being_built(lock.parent):
                lock.unlink(missing_ok=True)
                removed.append(lock)
                break
            if not announced:
                print(f"waiting for another build in {lock.parent}", flush=True)
                announced = True
            time.sleep(1.0)
    return removed


def build(op: str) -> float:
    """Load one operator, compiling it if need be; returns the seconds this took."""
    from deepspeed.accelerator import get_accelerator

    started = time.monotonic()
    builder = get_accelerator().create_op_builder(BUILDERS[op])
    if builder is None or not builder.is_compatible():
        hint = NEEDS.get(op, "see `ds_report` for what is missing")
        sys.exit(f"error: DeepSpeed cannot build {op} here: {hint}")
    builder.load(verbose=False)
    return time.monotonic() - started


def main() -> None:
    """Clear stale locks, then build each operator that was asked for."""
    parser = argparse.ArgumentParser(description="Build DeepSpeed's operators ahead of use.")
    parser.add_argument("ops", nargs="+", choices=sorted(BUILDERS))
    args = parser.parse_args()

    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    names = {accelerator.create_op_builder(BUILDERS[op]).name for op in args.ops}
    if "async_io" in args.ops:
        names.add("pin_memory")  # which it builds and loads first
    for lock in clear_stale_locks(extension_root(), names, STALE_AFTER_SECONDS):
        print(f"removed a lock that no build holds: {lock}")
    for op in args.ops:
        print(f"[ops] {op}: {build(op):.1f} s", flush=True)


if __name__ == "__main__":
    main()
