"""How fast a disk is for swap files, and what dead processes left in shared memory.

Owns two measurements of `ds-sft doctor`. The bandwidth is measured as DeepSpeed uses a disk: direct
reads and writes of 1 MiB, eight in flight, past the page cache. Invariants: both are bounded in
time, and no file stays behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_sft.engine.swap_files import PREFIX, size_of

BLOCK = 1 << 20
IN_FLIGHT = 8
SHARED_MEMORY = Path("/dev/shm")
# Segments of DeepSpeed's CPU collectives, NCCL and torch's data loaders.
SHARED_NAMES = ("deepspeed_*", "nccl-*", "torch_*")


def bandwidth(path: Path, num_bytes: int = 256 << 20, seconds: float = 3.0) -> tuple[float, float]:
    """Bytes per second written to and read from a file in `path`; each takes about `seconds`.

    Raises OSError, also when less than twice the space is free.
    """
    if shutil.disk_usage(path).free < 2 * num_bytes:
        raise OSError(f"less than {2 * num_bytes / 1e9:.1f} GB free")
    file = path / f"{PREFIX}speed-{os.getpid()}"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            blocks = num_bytes // BLOCK
            written, write_speed = _timed(
                lambda page, at: os.pwritev(descriptor, [page], at), blocks, seconds,
                finish=lambda: os.fsync(descriptor),
            )  # fmt: skip
            _, read_speed = _timed(
                lambda page, at: os.preadv(descriptor, [page], at), max(written, 1), seconds
            )
        finally:
            os.close(descriptor)
    finally:
        file.unlink(missing_ok=True)
    return write_speed, read_speed


def _timed(
    transfer: Callable[[mmap.mmap, int], int],
    blocks: int,
    seconds: float,
    finish: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """Transfer up to `blocks` blocks within `seconds`; how many were, and bytes per second."""
    started = time.monotonic()

    def worker(first: int) -> int:
        done = 0
        with mmap.mmap(-1, BLOCK) as page:  # direct transfers want aligned memory
            page.write(os.urandom(BLOCK))  # a disk that compresses would be too fast
            for block in range(first, blocks, IN_FLIGHT):
                if time.monotonic() - started > seconds:
                    break
                transfer(page, block * BLOCK)
                done += 1
        return done

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        counts = list(pool.map(worker, range(IN_FLIGHT)))
    finish()
    # Reads stay in what every worker wrote, also when the time was up in the middle.
    whole = min(counts) * IN_FLIGHT
    return whole, sum(counts) * BLOCK / max(time.monotonic() - started, 1e-9)


def shared_memory_leftovers(root: Path = SHARED_MEMORY) -> tuple[list[Path], int]:
    """Segments in shared memory that no living process holds, and their bytes.

    Only those of this user: whether another user's are held cannot be seen.
    """
    found = [p for name in SHARED_NAMES for p in root.glob(name) if _is_mine(p)]
    held = _held_files(root) if found else set()
    dead = [p for p in found if str(p) not in held]
    return dead, sum(size_of(p) if p.is_dir() else _blocks(p) for p in dead)


def _is_mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def _blocks(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _held_files(root: Path) -> set[str]:
    """Files below `root` that a process has mapped or open."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                name = line.split(maxsplit=5)[-1]
                if name.startswith(f"{root}/"):
                    held.add(name)
            held |= {
                str(target)
                for link in (process / "fd").iterdir()
                if (target := link.readlink()).is_relative_to(root)
            }
    return held
