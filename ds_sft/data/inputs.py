"""What `--input` names -> sources.

Owns the spelling: a file, a directory (the known files in it), a pattern, a Hub data set or a
`save_to_disk` directory, each with `:REPEATS` (a whole number) or `:FRACTION` (with a point, below
1) after it. A path that exists is that path, whatever colons it has. Nothing is never the current
directory.

Left to others: reading (`sources`, `tables`), the draws (`draws`).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ds_sft.data import hub
from ds_sft.data.hub import hub_home
from ds_sft.data.sources import TextSource
from ds_sft.data.tables import DatasetSource, ParquetSource, TableSource
from ds_sft.errors import ConfigError, DataError

TEXT = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
KNOWN = (*TEXT, ".parquet")
MAX_REPEATS = 1000

_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_AMOUNT = re.compile(r"\d+|\d*\.\d+|\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One `--input`: its sources in order, and how much of them is taken."""

    text: str
    """As it was given."""
    sources: list[TextSource | TableSource]
    repeats: int = 1
    fraction: float | None = None
    """Share of the rows that is drawn; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """How tables and data sets are opened."""

    split: str = "train"
    subset: str = ""
    columns: frozenset[str] = frozenset()
    """Columns to read beside those that the shapes know."""


def open_inputs(given: Collection[str], how: Tables, flag: str = "--input") -> list[Input]:
    """The sources that the words name. Raises DataError or ConfigError."""
    found = []
    for text in given:
        try:
            found.append(_open_input(text, how, flag))
        except OSError as error:
            raise DataError(f"{flag} {text} cannot be read: {error.strerror}") from None
    return found


def refuse_unused(how: Tables, inputs: Sequence[Input]) -> None:
    """Raises ConfigError for a split or a subset that none of the inputs has."""
    sets = [
        source for part in inputs for source in part.sources if isinstance(source, DatasetSource)
    ]
    if how.split != Tables().split and not sets:
        raise ConfigError(f"--split {how.split}: no input is a data set, files have none: drop it")
    if how.subset and not any(data.is_on_hub for data in sets):
        raise ConfigError(f"--subset {how.subset}: no input is a data set on the Hub: drop it")


def _open_input(text: str, how: Tables, flag: str) -> Input:
    where, repeats, fraction = _split_amount(text, flag)
    if not where:
        raise ConfigError(f"{flag} {text!r} names no file: give one, or . for the files here")
    return Input(
        text=text, sources=list(_sources(where, how, flag)), repeats=repeats, fraction=fraction
    )


def _split_amount(text: str, flag: str) -> tuple[str, int, float | None]:
    where, colon, amount = text.rpartition(":")
    if not colon or Path(text).exists() or not _AMOUNT.fullmatch(amount):
        return text, 1, None
    if "." in amount:
        if not 0 < float(amount) < 1:
            raise ConfigError(
                f"{flag} {text}: a number with a point is the share of the rows to draw, more "
                "than 0 and less than 1; a whole number is how often to repeat them"
            )
        return where, 1, float(amount)
    if not 1 <= int(amount) <= MAX_REPEATS:
        raise ConfigError(f"{flag} {text}: repeat from 1 to {MAX_REPEATS} times")
    return where, int(amount), None


def _sources(where: str, how: Tables, flag: str) -> Sequence[TextSource | TableSource]:
    path = Path(where)
    if path.is_file():
        return [_file(path, how)]
    if path.is_dir():
        return _directory(path, how, flag)
    if path.exists():
        raise DataError(
            f"{flag} {where} is a pipe or a device, and input may be read twice: write the rows "
            "to a file first"
        )
    if any(sign in where for sign in "*?["):
        found = [Path(name) for name in sorted(glob.glob(where, recursive=True))]
        files = [path for path in found if path.is_file()]
        if not files:
            raise DataError(f"{flag} {where} matches no file: check the pattern")
        return [_file(path, how) for path in files]
    if _HUB_ID.fullmatch(where) and not where.lower().endswith(KNOWN):
        _refuse_unknown(where, flag)
        return [DatasetSource(where, how.split, how.subset, how.columns)]
    raise DataError(
        f"{flag} {where} is not a file: check the name (a directory, a pattern or the id of a "
        f"data set on the Hub would do as well){_near(path)}"
    )


def _refuse_unknown(name: str, flag: str) -> None:
    """Raises DataError for what is no path here, and no data set on the Hub or in a cache."""
    answer = hub.ask("dataset", name)
    if answer.state == "there" or _is_cached(name):
        return
    why = (
        "the Hub has no such data set: check the name (a private one needs a login)"
        if answer.state == "absent"
        else f"as a data set's id it is in no cache and the Hub cannot be asked ({answer.reason}): "
        "check the path, or fetch the data set first"
    )
    raise DataError(f"{flag} {name} is no file or directory here, and {why}{_near(Path(name))}")


def _is_cached(name: str) -> bool:
    """Whether the datasets library has prepared it before; it spells names its own way there."""
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or hub_home() / "datasets").expanduser()
    spelt = _bare(name.replace("/", ""))
    return cache.is_dir() and any(_bare(entry.name) == spelt for entry in cache.iterdir())


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def _near(path: Path) -> str:
    """A name beside it that was perhaps meant, as the end of a message."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _directory(path: Path, how: Tables, flag: str) -> Sequence[TextSource | TableSource]:
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return [DatasetSource(str(path), how.split, how.subset, how.columns)]
    if (path / "pack_offsets.npy").exists():
        raise DataError(f"{flag} {path} is a packed data set already: name the chats it came from")
    files = [
        file
        for file in sorted(path.iterdir())
        if file.name.lower().endswith(KNOWN)
        and file.is_file()
        and file.name not in _NOT_ROWS
        and not file.name.startswith(".")
    ]
    if not files:
        raise DataError(
            f"{flag} {path} is not a file, and the directory holds none of {', '.join(KNOWN)}: "
            f"for files further down give a pattern such as '{path}/**/*.jsonl'"
        )
    return [_file(file, how) for file in files]


def _file(path: Path, how: Tables) -> TextSource | TableSource:
    if path.suffix.lower() == ".parquet":
        return ParquetSource(path, how.columns)
    return TextSource(path)
