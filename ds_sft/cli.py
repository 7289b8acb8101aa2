"""`ds-sft COMMAND`: find the command, import it, run it, and report what went wrong in one line.

Owns the list of commands and the one place where an error of ours becomes a line on stderr and an
exit code (`reporting`; training uses it too). Imports a command only when it is called, so that
`ds-sft --help` answers in a fraction of a second. Leaves every flag to its command.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from ds_sft.errors import ConfigError, DsSftError

COMMANDS = {
    "recipes": "the named recipes and model entries that --recipe takes",
    "prepare": "chats of every usual shape -> a packed data set",
    "plan": "what a run will do, need and refuse, without a GPU",
    "fit": "which DeepSpeed JSON fits a GPU at this length, and how fast it is",
    "train": "train on this host's environment; `deepspeed --module ds_sft.train` starts all ranks",
    "export": "a native checkpoint -> a Hugging Face model directory",
    "verify": "is a packed data set, a checkpoint or an export whole?",
    "reshard": "a native checkpoint -> one of another number of ranks",
    "inspect": "look into a data set: packs, documents, a text, rejected rows, plots",
    "doctor": "is this machine ready: compilers, operators, disks, memory, kernels?",
    "env": "write .deepspeed_env: the variables that workers on other hosts need",
}
_MAINS = {"plan": "ds_sft.plan_view", "train": "ds_sft.train"}
"""Commands that parse their own words: the recipe decides the defaults of their flags."""
_FLAGS = {
    "recipes": ("ds_sft.recipes", "RecipesFlags", "run"),
    "prepare": ("ds_sft.data.prepare", "PrepareFlags", "run"),
    "inspect": ("ds_sft.data.inspect", "InspectFlags", "run"),
    "fit": ("ds_sft.fit", "FitFlags", "run"),
    "export": ("ds_sft.run.commands", "ExportFlags", "export"),
    "verify": ("ds_sft.run.commands", "VerifyFlags", "verify"),
    "reshard": ("ds_sft.run.commands", "ReshardFlags", "reshard"),
    "doctor": ("ds_sft.run.doctor", "DoctorFlags", "run"),
    "env": ("ds_sft.run.launch_env", "EnvFlags", "run"),
}
"""Module, flags and function of the others."""
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_EPILOGUE = """\
A first run:
  ds-sft prepare --input chats.jsonl --tokenizer Qwen/Qwen3-8B --max-seq-len 32768 --out DATA
  ds-sft plan --recipe qwen3-8b --data DATA --out RUN --world-size 8
  deepspeed --module ds_sft.train --recipe qwen3-8b --data DATA --out RUN

`ds-sft COMMAND --help` lists the flags of a command."""


def main(argv: Sequence[str] | None = None) -> None:
    """The `ds-sft` command. Ends the process with the exit code of what happened."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with reporting(), contextlib.nullcontext() if argv[:1] == ["train"] else _tidy_pipe():
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(overview())
            return
        if argv[0] in ("-V", "--version"):
            from ds_sft import __version__

            print(f"ds-sft {__version__}")
            return
        _run(argv[0], argv[1:])


def overview() -> str:
    """What `ds-sft --help` prints."""
    rows = [f"  {name:<9} {line}" for name, line in COMMANDS.items()]
    head = "usage: ds-sft COMMAND [flags]\n\nFull-parameter fine-tuning on DeepSpeed ZeRO-3.\n"
    return "\n".join([head, *rows, "", _EPILOGUE])


def _run(command: str, argv: list[str]) -> None:
    """Import one command and run it with the rest of the words."""
    if command in _MAINS:
        importlib.import_module(_MAINS[command]).main(argv)
    elif command in _FLAGS:
        from ds_sft.flags import parse_flags, parse_with_preset

        name, flags, function = _FLAGS[command]
        module = importlib.import_module(name)
        parse = parse_with_preset if command == "prepare" else parse_flags
        parsed: object = parse(getattr(module, flags), argv, f"ds-sft {command}")
        getattr(module, function)(parsed)
    else:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"use {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command `{command}`: {hint}")


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Turn what a person has to read into one line and an exit code; a bug keeps its traceback."""
    try:
        yield
    except DsSftError as error:
        report(error)
    except OSError as error:
        # Of a path that a person named, wherever it was first looked at.
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES) or error.filename is None:
            raise
        name = str(error.filename)
        name = name if len(name) <= 200 else f"{name[:100]}..."
        report(ConfigError(f"{name} cannot be used: {os.strerror(error.errno).lower()}"))
    except KeyboardInterrupt:
        say("interrupted")
        raise SystemExit(_INTERRUPTED) from None


@contextlib.contextmanager
def _tidy_pipe() -> Iterator[None]:
    """`ds-sft plan | head`: a reader that has enough is no failure; a full disk is one, in a line.

    For the commands only: in training a lost console must never look like a success.
    """
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(0) from None
    except OSError as error:
        try:
            print(flush=True)  # was it stdout, which then fails again, or a file?
        except OSError:
            _drop_stdout()
            say(f"error: standard output cannot be written: {error.strerror}")
            raise SystemExit(1) from None
        raise


def _drop_stdout() -> None:
    """Lead stdout nowhere: the interpreter would complain when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: DsSftError) -> NoReturn:
    """Print `error: ...` on stderr, on rank 0 only, and end with the error's exit code."""
    say(f"error: {' '.join(str(error).split())}")
    raise SystemExit(error.exit_code) from None


def say(line: str) -> None:
    """One line on stderr, from rank 0 only: eight ranks with the same wrong flag say it once."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
