"""The command line of training and planning: words in, `RunConfig` and `Recipe` out.

Owns the reading of recipe files, the precedence of flags over presets and recipes, and the one-line
form of every argument error. The flags themselves are the fields of `RunConfig` and of `Recipe`.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ds_sft import presets
from ds_sft.errors import ConfigError
from ds_sft.recipe.entries import ENTRIES, entry_named, recipe_named, require_verified
from ds_sft.recipe.named import RECIPES, recipe_from_mapping
from ds_sft.recipe.recipe import NO_FP8, Recipe, asks_for_fp8
from ds_sft.run_config import DEFAULT_RECIPE, RunConfig

T = TypeVar("T")

# Flags of the first trainer that have no meaning on DeepSpeed, and what to do instead.
REPLACED_FLAGS = {
    "--init-mode": "ZeRO-3 always loads shard by shard; drop the flag",
    "--wrap-embeddings": "ZeRO-3 partitions every parameter; drop the flag",
    "--fused-adam": "the optimizer follows --deepspeed-config (CPU offload takes CPU Adam): "
    "drop the flag",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """Everything on the command line of training."""

    run: RunConfig
    """Where and when."""
    science: Recipe
    """What decides the loss curve; defaults are those of --recipe."""


def parse_train(argv: Sequence[str], prog: str = "ds_sft.train") -> tuple[RunConfig, Recipe]:
    """`RunConfig` and `Recipe` from the command line. Raises ConfigError."""
    flags = parse_with_recipe(TrainFlags, argv, prog)
    return flags.run, flags.science


def parse_with_recipe(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a dataclass with a `run: RunConfig` and a `science: Recipe` part.

    The recipe named by `--recipe` supplies the defaults of the science's flags; over them lies
    what `--preset` says, and over that what was given.
    """
    argv = accept_old_spellings(argv)
    asked = _peek(argv, "--recipe")
    name = DEFAULT_RECIPE if asked is None else asked
    base, entry = load_recipe(name), entry_named(name)
    given = given_flags(argv)
    if not {"model_id", "allow_unverified"} & given:
        require_verified(name)
    steps = _peek(argv, "--num-train-steps") or _peek(argv, "--num_train_steps")
    epochs = _peek(argv, "--epochs")
    if steps and epochs:
        raise ConfigError(f"--epochs {epochs} and --num-train-steps {steps} exclude each other")
    defaults = {"run": tyro.MISSING_NONPROP, "science": base}
    without = {"epochs"} if steps else set()
    of_entry = {} if entry is None else entry.of_training()
    words = [
        *field_words({k: v for k, v in of_entry.items() if k not in without}),
        *preset_words(argv, presets.of_training, without=without),
    ]
    parsed: Any = parse_flags(cls, [*words, *argv], prog, defaults=defaults)
    chosen = {**dataclasses.asdict(parsed.run), **dataclasses.asdict(parsed.science)}
    recipe = {field.name for field in dataclasses.fields(base)} | of_entry.keys()
    origins = presets.origins(parsed.run.preset, given, chosen, recipe)
    run = dataclasses.replace(parsed.run, preset_origins=origins)
    return dataclasses.replace(parsed, run=run)  # type: ignore[no-any-return]


def parse_with_preset(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse the flags of `prepare`, of which a preset and a model entry decide some."""
    name = _peek(argv, "--recipe") or ""
    of_entry = _of_prepare(name)
    words = [*field_words(of_entry), *preset_words(argv, presets.of_prepare)]
    parsed: Any = parse_flags(cls, [*words, *argv], prog)
    given = given_flags(argv)
    origins = presets.origins(parsed.preset, given, dataclasses.asdict(parsed), of_entry.keys())
    return dataclasses.replace(parsed, preset_origins=origins)  # type: ignore[no-any-return]


def preset_words(
    argv: Sequence[str],
    fields_of: Callable[[str], Mapping[str, object]],
    without: Set[str] = frozenset(),
) -> list[str]:
    """The fields of the preset in `argv` as words to put before it: the last value counts."""
    fields = fields_of(_peek(argv, "--preset") or "")
    return field_words({name: value for name, value in fields.items() if name not in without})


def field_words(fields: Mapping[str, object]) -> list[str]:
    """Fields and their values as words of a command line."""
    words: list[str] = []
    for name, value in fields.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


def _of_prepare(recipe: str) -> dict[str, object]:
    """What a recipe or a model entry says about preparing data; nothing without a name."""
    if not recipe:
        return {}
    base, entry = load_recipe(recipe), entry_named(recipe)
    template = {"chat_template": base.chat_template} if base.chat_template else {}
    return {**template, **({} if entry is None else entry.of_prepare())}


def given_flags(argv: Sequence[str]) -> set[str]:
    """Names of the fields whose flags are on the command line."""
    return {w[2:].partition("=")[0].replace("-", "_") for w in argv if w.startswith("--")}


def parse_flags(
    cls: type[T], argv: Sequence[str], prog: str, defaults: dict[str, object] | None = None
) -> T:
    """Parse `argv` into `cls` with tyro. Raises ConfigError with one line instead of tyro's box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                cls,
                args=list(argv),
                prog=prog,
                default=cls(**defaults) if defaults else tyro.MISSING_NONPROP,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(_one_line(said.getvalue(), prog)) from None


def _one_line(box: str, prog: str) -> str:
    """The message inside tyro's box: up to the hint at the full help, without the frame."""
    rows = [re.sub(r"^[│╭╰─ ]+|[│╮╯─ ]+$", "", row).strip() for row in box.splitlines()[1:]]
    words: list[str] = []
    for row in rows:
        if row.startswith(("For full helptext", "Argument helptext")):
            break
        if row.strip("-"):  # without a UTF-8 terminal the frame is made of dashes
            words.append(row)
    message = re.sub(r"\s+", " ", " ".join(words)).strip().replace(f" from {prog}:", ":", 1)
    return f"{message or 'the arguments are wrong'} (see {prog} --help)"


def accept_old_spellings(argv: Sequence[str]) -> list[str]:
    """Translate what launchers and the first trainer pass; refuse what no longer exists."""
    out: list[str] = []
    skip_next = False
    _refuse_fp8(argv)
    for word in argv:
        name = word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
        if skip_next:
            skip_next = False
        elif name in REPLACED_FLAGS:
            raise ConfigError(f"{name} is a flag of the FSDP trainer: {REPLACED_FLAGS[name]}")
        elif name == "--local-rank":  # the launcher's; the rank comes from the environment
            skip_next = "=" not in word
        elif name == "--shuffle":
            out += ["--order", "shuffle"]
        else:
            out.append(word)
    return out


def _refuse_fp8(argv: Sequence[str]) -> None:
    """Raise ConfigError for a flag, or a precision, that means FP8: no list of choices says why."""
    for word, value in itertools.pairwise([*argv, ""]):
        name, _, given = word.partition("=")
        is_precision = re.fullmatch(r"--.*[-_]dtype", name) and asks_for_fp8(given or value)
        if word.startswith("--") and (asks_for_fp8(name) or is_precision):
            raise ConfigError(f"{name} {given or value}".strip() + f": {NO_FP8}")


def load_recipe(name: str) -> Recipe:
    """A named recipe, or the one in a TOML file. Raises ConfigError."""
    if not name.endswith(".toml"):
        return recipe_named(name)
    path = Path(name)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"recipe file {name} does not exist: use {', '.join([*RECIPES, *ENTRIES])} or a path"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"recipe file {name} cannot be read: {e}") from None
    return recipe_from_mapping(values, name)


def _peek(argv: Sequence[str], flag: str) -> str | None:
    """Value of `flag` in `argv` before it is parsed in earnest; the last one counts."""
    value = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value
