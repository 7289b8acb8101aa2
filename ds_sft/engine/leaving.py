"""How a rank ends: with the exit code of what happened, whatever Python's teardown makes of it.

Python takes its interpreter apart under the threads of torch, gloo and DeepSpeed. Now and then that
is an abort (SIGABRT, which the launcher reports as 250 or -6), also of a rank that had finished. So
a rank that has met the others leaves without it. Leaves the words of an error to `cli`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

from ds_sft.engine import meeting, swap_files


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """After an error between the ranks, leave with its exit code.

    Before they have met, those of other hosts are told instead. To close the process group in
    order would take the other ranks. What crashes below Python shows its stacks.
    """
    faulthandler.enable(file=2)
    try:
        yield
    except BaseException as error:
        if not meeting.over():
            meeting.tell_others()
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        swap_files.release()
        code = error.code if isinstance(error, SystemExit) else 1
        _leave(code if isinstance(code, int) else 1)


def leave() -> NoReturn:
    """End this process, whose work is done, with exit code 0; what asked to be told is told."""
    atexit._run_exitfuncs()
    _leave(0)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
