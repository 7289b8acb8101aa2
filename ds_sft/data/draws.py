"""Which rows of which source are taken, and how often.

Owns `--input PATH:FRACTION`, `PATH:REPEATS`, `--max-samples` and the draw of the validation part:
every draw is exact (so many of so many rows), from `--seed` alone, and independent of the workers.
Invariants: a row that is drawn for validation is trained in no repeat of its source, nor where the
same file is named again; rows stay in the order of the input; without a draw nothing is counted
first.

A draw reads every file once more, to count its rows, and holds 9 bytes a row meanwhile, 1 after.
Left to others: reading (`sources`, `tables`), what the paths name (`inputs`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_sft.data.inputs import Input
from ds_sft.data.sources import TextSource
from ds_sft.data.tables import TableSource
from ds_sft.errors import DataError

Keep = npt.NDArray[np.bool_]
_FRACTION, _VALIDATION, _SAMPLES, _VALIDATION_SAMPLES = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """One pass over a source."""

    source: TextSource | TableSource
    keep: Keep | None = None
    """Whether each row is taken; None: all are."""
    file: int = 0
    """Number of the source; the same for each of its repeats."""

    def takes(self, ordinal: int) -> bool:
        """Whether the row of this number, from 0, is taken. Raises DataError if there is none."""
        assert self.keep is not None
        if ordinal >= len(self.keep):
            self._changed(f"more than {len(self.keep)} rows")
        return bool(self.keep[ordinal])

    def check_end(self, num_rows: int) -> None:
        """Raises DataError if the source ended before all the rows that were counted."""
        if self.keep is not None and num_rows != len(self.keep):
            self._changed(f"{num_rows} rows")

    def _changed(self, now: str) -> None:
        assert self.keep is not None
        raise DataError(
            f"{self.source.name} had {len(self.keep)} rows and now has {now}: it is being written "
            "to; wait until it is whole"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What is drawn."""

    seed: int = 0
    validation_fraction: float = 0.0
    """Share of the rows that becomes the validation part; 0: none."""
    max_samples: int = 0
    """Most rows of the training part, and ten times those of the validation part; 0: all."""


def must_count(inputs: Sequence[Input], draw: Draw) -> bool:
    """Whether the rows of all inputs are counted before any is prepared."""
    drawn = draw.validation_fraction > 0 or draw.max_samples > 0
    return drawn or any(part.fraction is not None for part in inputs)


def plan(
    inputs: Sequence[Input], validation: Sequence[Input], draw: Draw
) -> tuple[list[Take], list[Take]]:
    """The passes of the training part and of the validation part. Raises DataError."""
    if not must_count([*inputs, *validation], draw):
        after = sum(len(part.sources) for part in inputs)
        return _everything(inputs), _everything(validation, after)
    train = [_of_fraction(part, number, draw.seed) for number, part in enumerate(inputs)]
    chosen = [
        _of_fraction(part, len(inputs) + number, draw.seed)
        for number, part in enumerate(validation)
    ]
    files = list(inputs)
    repeats = [part.repeats for part in inputs]
    limit = max(1, draw.max_samples // 10) if draw.max_samples else 0
    if draw.validation_fraction:
        train, chosen = _set_aside(inputs, train, draw, limit)
        takes = _passes(files, chosen, [1] * len(files))
    else:
        after = sum(len(part.sources) for part in inputs)
        takes = _passes(validation, chosen, [part.repeats for part in validation], after)
        takes = _at_most(takes, limit, draw.seed, _VALIDATION_SAMPLES)
    return _at_most(_passes(files, train, repeats), draw.max_samples, draw.seed, _SAMPLES), takes


def _everything(inputs: Sequence[Input], first: int = 0) -> list[Take]:
    takes = []
    for part in inputs:
        for _ in range(part.repeats):
            takes += [
                Take(source, None, first + number) for number, source in enumerate(part.sources)
            ]
        first += len(part.sources)
    return takes


def _of_fraction(part: Input, number: int, seed: int) -> Keep:
    """The rows of one input, all its files end to end."""
    total = sum(source.count_rows() for source in part.sources)
    if part.fraction is None:
        return np.ones(total, np.bool_)
    wanted = max(1, round(part.fraction * total)) if total else 0
    return choose(total, wanted, [seed, _FRACTION, number])


def _set_aside(
    inputs: Sequence[Input], train: list[Keep], draw: Draw, limit: int
) -> tuple[list[Keep], list[Keep]]:
    """Take the validation part's rows out of the inputs; a file named twice is drawn from once."""
    files = [os.path.realpath(source.name) for part in inputs for source in part.sources]
    kept = [rows for part, keep in zip(inputs, train, strict=True) for rows in _split(part, keep)]
    pool: dict[str, Keep] = {}
    for file, keep in zip(files, kept, strict=True):
        pool[file] = pool[file] | keep if file in pool else keep
    total = sum(int(keep.sum()) for keep in pool.values())
    wanted = max(1, round(draw.validation_fraction * total))
    wanted = min(wanted, limit) if limit else wanted
    if wanted >= total:
        raise DataError(
            f"--validation-fraction {draw.validation_fraction:g} of {total} rows leaves none to "
            "train on: give more rows or --validation-input"
        )
    everything = np.concatenate(list(pool.values()))
    drawn = np.zeros(len(everything), np.bool_)
    drawn[np.flatnonzero(everything)[choose(total, wanted, [draw.seed, _VALIDATION])]] = True
    edges = np.cumsum([len(keep) for keep in pool.values()])[:-1]
    aside = dict(zip(pool, np.split(drawn, edges), strict=True))
    rest = [keep & ~aside[file] for file, keep in zip(files, kept, strict=True)]
    once = [aside.pop(file, np.zeros_like(keep)) for file, keep in zip(files, kept, strict=True)]
    edges = np.cumsum([len(keep) for keep in train])[:-1]
    return np.split(np.concatenate(rest), edges), np.split(np.concatenate(once), edges)


def _split(part: Input, keep: Keep) -> list[Keep]:
    """The rows of one input, source by source."""
    return np.split(keep, np.cumsum([source.count_rows() for source in part.sources])[:-1])


def _passes(
    inputs: Sequence[Input], kept: Sequence[Keep], repeats: Sequence[int], first: int = 0
) -> list[Take]:
    """The passes over the rows that are kept; sources are numbered from `first`."""
    takes = []
    for part, keep, times in zip(inputs, kept, repeats, strict=True):
        once = [
            Take(source, rows, first + number)
            for number, (source, rows) in enumerate(
                zip(part.sources, _split(part, keep), strict=True)
            )
        ]
        takes += once * times
        first += len(part.sources)
    return takes


def _at_most(takes: list[Take], limit: int, seed: int, which: int) -> list[Take]:
    """Draw `limit` of the rows of all passes together; a row of another pass is another row."""
    counts = [int(take.keep.sum()) for take in takes if take.keep is not None]
    if not limit or sum(counts) <= limit:
        return takes
    chosen = np.split(choose(sum(counts), limit, [seed, which]), np.cumsum(counts)[:-1])
    drawn = []
    for take, rows in zip(takes, chosen, strict=True):
        assert take.keep is not None
        keep = np.zeros_like(take.keep)
        keep[np.flatnonzero(take.keep)[rows]] = True
        drawn.append(Take(take.source, keep, take.file))
    return drawn


def choose(total: int, wanted: int, seed: Sequence[int]) -> Keep:
    """`wanted` of `total` rows, each set of so many as likely as another.

    The rows with the smallest of as many random numbers: of these numpy promises the stream.
    """
    if wanted >= total:
        return np.ones(total, np.bool_)
    keys = np.random.Generator(np.random.PCG64(list(seed))).random(total)
    keep = np.zeros(total, np.bool_)
    keep[np.argpartition(keys, wanted)[:wanted]] = True
    return keep
