"""DeepSpeed's compiled operators: built once, in one process, before anything needs them.

Owns the trap around their locks. An operator is compiled at its first use and kept in torch's
extension cache, behind a lock file; a build that was killed leaves that file, and every later run
then waits on it for ever without a word. So locks that nobody holds are removed here.
Assumes that the cache belongs to this machine alone: on a shared home directory set
TORCH_EXTENSIONS_DIR to a local folder. Imports torch only in functions.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ds_sft.engine.host_memory import device
from ds_sft.errors import ConfigError

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
}
NEEDS = {"async_io": "install libaio's headers (scripts/install_nvme_deps.sh, as root)"}
BUILT_WITH = {"async_io": ("pin_memory",)}  # which it builds and loads first
# A builder takes the lock a moment before its compiler starts: a younger lock may be in use.
STALE_AFTER_SECONDS = 60.0


def extension_root() -> Path:
    """Folder that holds torch's compiled extensions; those of one Python lie one level deeper."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def folders(name: str) -> list[Path]:
    """Where the extension `name` may lie for this Python and this torch."""
    import torch

    cuda = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return [extension_root() / f"{python}_{cuda}" / name, extension_root() / name]


def is_built(op: str) -> bool:
    """Whether an operator, with those it needs, was compiled before by this environment."""
    return all(
        any(_is_ours(folder, name) for folder in folders(name)) or _is_installed(name)
        for name in (op, *BUILT_WITH.get(op, ()))
    )


def _is_ours(folder: Path, name: str) -> bool:
    """Whether `folder` holds the extension, built from this environment's sources.

    Environments share the cache: for another one's build every run would start the compiler again.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None or not (folder / f"{name}.so").is_file():
        return False
    try:
        orders = (folder / "build.ninja").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # copied here without them
    return str(Path(spec.origin).parent) in orders


def _is_installed(name: str) -> bool:
    """Whether DeepSpeed was installed with the operator (DS_BUILD_OPS)."""
    places = {"cpu_adam": "adam", "fused_adam": "adam", "async_io": "aio"}
    try:
        spec = importlib.util.find_spec(f"deepspeed.ops.{places.get(name, name)}.{name}_op")
    except ImportError:
        return False
    return spec is not None


def is_being_built(folder: Path) -> bool:
    """Is a process of this machine working in `folder`, as ninja and the compiler do?"""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve().is_relative_to(folder.resolve()):
                return True
        except OSError:
            continue  # the process ended, or belongs to another user
    return False


def locks(root: Path, names: Iterable[str]) -> list[Path]:
    """The lock files of the operators `names`."""
    found = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    wanted = set(names)
    return sorted(path for path in found if path.parent.name in wanted)


def is_stale(lock: Path, stale_after: float = STALE_AFTER_SECONDS) -> bool:
    """Whether no build holds `lock`."""
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    # A clock that was set back makes a lock look as if it came from the future.
    return abs(age) > stale_after and not is_being_built(lock.parent)


def clear_stale_locks(root: Path, names: Iterable[str], stale_after: float) -> list[Path]:
    """Remove the locks of the operators `names` that no build holds; wait for those in use.

    Returns the removed paths. Waits as long as a build goes on, and says so.
    """
    removed: list[Path] = []
    for lock in locks(root, names):
        announced = False
        while lock.exists():
            if is_stale(lock, stale_after):
                lock.unlink(missing_ok=True)
                removed.append(lock)
                break
            if not announced:
                print(f"waiting for another build in {lock.parent}", flush=True)
                announced = True
            time.sleep(1.0)
    return removed


def builder(op: str) -> Any:
    """DeepSpeed's builder of an operator; None where its accelerator has none."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(BUILDERS[op])


def build(op: str) -> float:
    """Load one operator, compiling it if need be; returns the seconds this took.

    Raises ConfigError when it cannot be built here.
    """
    started = time.monotonic()
    found = builder(op)
    hint = NEEDS.get(op, "`ds_report` says what is missing")
    if found is None or not found.is_compatible():
        raise ConfigError(f"DeepSpeed cannot build {op} here: {hint}")
    try:
        found.load(verbose=False)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{op} cannot be built here ({reason}): {hint}") from error
    return time.monotonic() - started


def build_all(ops: Sequence[str]) -> None:
    """Clear stale locks, then build each operator of `ops`, in this process. Raises ConfigError."""
    # Called from elsewhere, the environment's ninja is not in PATH, and DeepSpeed looks there.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    clear(ops)
    for op in ops:
        print(f"[ops] {op}: {build(op):.1f} s", flush=True)


def clear(ops: Iterable[str]) -> None:
    """Remove the locks of `ops` that no build holds, on which a run would wait for ever."""
    for lock in clear_stale_locks(extension_root(), names_of(ops), STALE_AFTER_SECONDS):
        print(f"removed a lock that no build holds: {lock}", flush=True)


def needed_by(ds_config: dict[str, Any]) -> list[str]:
    """The operators that a run with this configuration loads; it waits for no other's build."""
    zero = ds_config["zero_optimization"]
    optimizer, params = (device(zero, name) for name in ("offload_optimizer", "offload_param"))
    found = ["cpu_adam"] if optimizer != "none" else []
    return [*found, "async_io"] if "nvme" in (optimizer, params) else found


def names_of(ops: Iterable[str]) -> set[str]:
    """The extensions that belong to the operators `ops`."""
    return {name for op in ops for name in (op, *BUILT_WITH.get(op, ()))}
