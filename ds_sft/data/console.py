"""The console of the data commands, and what happens when its reader goes away (`... | head`).

Invariant: what prepare writes does not depend on who reads its lines. Left to others: the lines.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console(*, needs_reader: bool) -> Console:
    """Lines on stdout, as wide as they are, without colours of its own.

    Without a reader: a command that only shows something ends (BrokenPipeError, which the command
    line takes for a success), one that writes goes on in silence. Rich itself would exit with 1.
    """
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            if needs_reader:
                raise BrokenPipeError
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return PipeConsole(highlight=False, soft_wrap=True, emoji=False)
