"""One run per directory: the file `<out>/lock` names who writes there, and that it is alive.

Owns the decision whether another run of the same `--out` is alive. A file lock alone is not
trusted on network file systems, so the holder writes host, process id and a beat that it counts up;
on the same host the process itself is looked for, from another host the beat has to go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from ds_sft.errors import ConfigError
from ds_sft.run.atomic import write_file

BEAT_SECONDS = 5.0
WATCH_SECONDS = 3 * BEAT_SECONDS  # a network file system shows a beat late


class RunLock:
    """Held by rank 0 from before the ranks meet until its training ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises ConfigError while a living run holds it."""
        self._path = path
        self._ended = threading.Event()
        self._refuse_living(read(path))
        self._beat = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            raise ConfigError(f"--out {path.parent} cannot be written: {error}") from None
        threading.Thread(target=self._keep_beating, daemon=True).start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the directory free; after a kill, the next start finds out by itself."""
        self._ended.set()
        self._path.unlink(missing_ok=True)

    def _refuse_living(self, holder: dict[str, Any] | None) -> None:
        if holder is None or not is_alive(holder, self._path):
            return
        raise ConfigError(
            f"another run of --out {self._path.parent} is alive (host {holder['host']}, process "
            f"{holder['pid']}): stop it with `touch {self._path.parent}/stop`, or use another --out"
        )

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk must not end a healthy run
                self._write()

    def _write(self) -> None:
        self._beat += 1
        me = {"host": socket.gethostname(), "pid": os.getpid(), "born": born(os.getpid())}
        write_file(self._path, json.dumps({**me, "beat": self._beat}) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """Who holds the lock; None when nobody does, or the file says nothing."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return {name: holder[name] for name in ("host", "pid", "born", "beat")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_alive(holder: dict[str, Any], path: Path) -> bool:
    """Whether the holder still runs."""
    if holder["host"] == socket.gethostname():
        return born(int(holder["pid"])) == holder["born"] is not None
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        now = read(path)
        if now is not None and now["beat"] != holder["beat"]:
            return True
    return False


def born(pid: int) -> int | None:
    """When a process of this host started, in clock ticks after boot: a reused number differs."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
