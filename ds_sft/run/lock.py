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
import sys
import threading
import time
import uuid
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
        self._me = {"host": here(), "pid": os.getpid(), "born": born(os.getpid())}
        self._beat = 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while not self._took():
                self._remove_dead(read(path))
        except OSError as error:
            raise ConfigError(f"--out {path.parent} cannot be written: {error}") from None
        self._beating = threading.Thread(target=self._keep_beating, daemon=True)
        self._beating.start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the directory free; after a kill, the next start finds out by itself."""
        self._ended.set()
        self._beating.join(timeout=BEAT_SECONDS)  # a beat on its way would write the file again
        if self._is_mine():
            self._path.unlink(missing_ok=True)

    def _took(self) -> bool:
        """Put the lock there, unless somebody's is: a hard link is made by one process only."""
        mine = self._path.with_name(f".lock-{uuid.uuid4().hex[:12]}")
        try:
            mine.write_text(self._text(), encoding="utf-8")
            os.link(mine, self._path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            return self._created()
        finally:
            mine.unlink(missing_ok=True)
        return True

    def _created(self) -> bool:
        try:
            with self._path.open("x", encoding="utf-8") as file:
                file.write(self._text())
        except FileExistsError:
            return False
        return True

    def _remove_dead(self, holder: dict[str, Any] | None) -> None:
        """Raises ConfigError while a living run holds the lock."""
        if holder is not None and is_alive(holder, self._path):
            raise ConfigError(
                f"another run of --out {self._path.parent} is alive (host {_name(holder)}, "
                f"process {holder['pid']}): stop it with `touch {self._path.parent}/stop`, or use "
                "another --out"
            )
        # Two may have found it dead: one of them renames it, and must not rename the other's new
        # lock. What was renamed is looked at again for that.
        aside = self._path.with_name(f".lock-{uuid.uuid4().hex[:12]}")
        if read(self._path) != holder:
            return
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(aside)
            if read(aside) == holder:
                aside.unlink()
            else:
                aside.rename(self._path)

    def _is_mine(self) -> bool:
        holder = read(self._path)
        return holder is not None and {k: holder[k] for k in self._me} == self._me

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            holder = read(self._path)
            if holder is not None and not self._is_mine():
                # We were taken for dead, for example while this machine was suspended.
                print(
                    f"error: {self._path.parent} was taken over by process {holder['pid']} on host "
                    f"{_name(holder)}: this run ends, that one goes on",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                os._exit(1)
            with contextlib.suppress(OSError):  # a full disk must not end a healthy run
                self._write()

    def _write(self) -> None:
        self._beat += 1
        write_file(self._path, self._text())

    def _text(self) -> str:
        return json.dumps({**self._me, "beat": self._beat}) + "\n"


def read(path: Path) -> dict[str, Any] | None:
    """Who holds the lock; None when nobody does, or the file says nothing."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        found = {name: holder[name] for name in ("host", "pid", "born", "beat")}
        good = isinstance(found["pid"], int) and isinstance(found["host"], str)
        return found if good else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_alive(holder: dict[str, Any], path: Path) -> bool:
    """Whether the holder still runs."""
    if holder["host"] == here():
        return born(holder["pid"]) == holder["born"] is not None
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        now = read(path)
        if now is not None and now != holder:  # it beats, or another one has taken its place
            return True
    return False


def here() -> str:
    """This host, and where in it process numbers mean what they say: a container has its own.

    Hosts made from one image may have one name; what tells them apart is their boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {boot}"


def _name(holder: dict[str, Any]) -> str:
    """The part of `here` that a person knows."""
    return str(holder["host"]).partition(" ")[0]


def born(pid: object) -> int | None:
    """When a process of this host started, in clock ticks after boot: a reused number differs.

    None for one that is not there, or has ended and waits to be buried.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
