"""The console of all commands, and what happens when its reader goes away (`... | head`).

Invariant: what prepare writes does not depend on who reads its lines. Left to others: the lines and
tables. A training's console is another: no lost reader ends it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console(*, needs_reader: bool, tables: bool = False, width: int | None = None) -> Console:
    """Stdout without colours of its own. Without `tables`, lines are as wide as they are.

    With them it folds at `width` (none: the terminal's), and what looks like markup is text.

    Without a reader: a command that only shows something ends (BrokenPipeError, which the command
    line takes for a success), one that writes goes on in silence. Rich itself would exit with 1.
    """
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            if needs_reader:
                raise BrokenPipeError
            self.quiet = True
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)

    return PipeConsole(
        highlight=False, soft_wrap=not tables, emoji=False, markup=not tables, width=width
    )
