"""A console that may go away: a terminal that is closed, a reader of the pipe that has ended.

Owns what happens to words that nobody can read any more. Invariant: a lost console ends no
training, least of all before its save; what the run says is in metrics.jsonl too. For training
only: a command whose output nobody reads has no reason to go on. No torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast


class _Lasting:
    """A text stream that turns into nothing once it can no longer be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            # The words that wait in the stream's buffer must have somewhere to go when Python ends.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_console() -> None:
    """From now on no lost stdout or stderr raises."""
    if not isinstance(sys.stdout, _Lasting):
        sys.stdout = cast(TextIO, _Lasting(sys.stdout))
    if not isinstance(sys.stderr, _Lasting):
        sys.stderr = cast(TextIO, _Lasting(sys.stderr))
