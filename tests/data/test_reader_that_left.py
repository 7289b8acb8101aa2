"""A reader that has seen enough is no failure of the command that it read from."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_sft.data.console import open_console

SOURCES = Path(__file__).parents[2] / "ds_sft"


@contextlib.contextmanager
def without_reader() -> Iterator[None]:
    """Stdout is a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield
        nothing = os.open(os.devnull, os.O_WRONLY)  # for what waits in the stream's buffer
        os.dup2(nothing, writer)
        os.close(nothing)


@pytest.mark.parametrize("tables", [False, True])
def test_a_command_that_shows_something_ends_without_a_reader(tables: bool) -> None:
    console = open_console(needs_reader=True, tables=tables, width=100)
    with without_reader(), pytest.raises(BrokenPipeError):
        console.print("row")


def test_a_command_that_writes_goes_on_without_a_reader() -> None:
    console = open_console(needs_reader=False)
    with without_reader():
        console.print("one")
        console.print("two")
    assert console.quiet


def test_no_other_console_is_made_anywhere() -> None:
    """rich's own ends the process with 1 when its reader goes away."""
    makers = [p for p in SOURCES.rglob("*.py") if re.search(r"\bConsole\(", p.read_text())]
    assert makers == []
