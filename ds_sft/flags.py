"""The command line of training and planning: words in, `RunConfig` and `Recipe` out.

Owns the flags that say where and when (`RunConfig`), the reading of recipe files, and the one-line
form of every argument error. The science's flags are the fields of `Recipe` itself: `--recipe`
picks the defaults that the other flags then override. Imports neither torch nor numpy.
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
from typing import Any, Literal, TypeVar

import tyro

from ds_sft import presets
from ds_sft.errors import ConfigError
from ds_sft.recipe.entries import ENTRIES, entry_named, recipe_named, require_verified
from ds_sft.recipe.recipe import (
    NO_FP8,
    RECIPES,
    Recipe,
    asks_for_fp8,
    recipe_from_mapping,
)

T = TypeVar("T")
LARGEST = 1_000_000_000  # of any count or time on the command line; also keeps infinity out
DEFAULT_RECIPE = "qwen3-8b"

# Flags of the first trainer that have no meaning on DeepSpeed, and what to do instead.
REPLACED_FLAGS = {
    "--init-mode": "ZeRO-3 always loads shard by shard; drop the flag",
    "--wrap-embeddings": "ZeRO-3 partitions every parameter; drop the flag",
    "--fused-adam": "the optimizer follows --deepspeed-config (CPU offload takes CPU Adam): "
    "drop the flag",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where and when: what moves no loss."""

    data: Path
    """Packed data set, made by `ds-sft prepare`."""
    out: Path | None = None
    """Run directory: run.json, metrics.jsonl, checkpoints/, hf/, finished."""
    recipe: str = DEFAULT_RECIPE
    """Named recipe or model entry (`ds-sft recipes` lists them), or a .toml file."""
    allow_unverified: bool = False
    """Take a model entry that is marked unverified."""
    preset: str = ""
    """Flags for one card of a size: smoke-12gb, 16gb, 24gb or 80gb; flags given here win over it,
    and it wins over the recipe."""
    preset_origins: tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]] = ()
    """Where the fields that a preset may decide have their values from; no flag."""
    deepspeed_config: Path = Path("ds_configs/zero3.json")
    """Plain DeepSpeed JSON; what the recipe decides is not in it."""
    nvme_path: Path | None = None
    """Directory on a local disk for swap files; default: nvme_path of the DeepSpeed JSON."""
    tokenizer: str = ""
    """Tokenizer that exports write; default: the one stored with the data, else the model's."""
    epochs: float = 0.0
    """Length of the run in passes over the data; excludes --num-train-steps."""
    per_device_batch: int = 1
    """Packs per rank in one microbatch."""
    memory_budget_gb: float = 0.0
    """End the run when a rank's peak (allocated on its GPU; on a CPU its resident memory) exceeds
    so many 1e9 bytes by a tenth; 0 = no budget."""
    allow_idle: bool = False
    """Accept more than 25 % idle slots when the world size does not divide the batch."""
    loss_chunk_size: int = 2048
    """Tokens per chunk of the cross-entropy; 0 = the whole row at once."""
    allow_full_logits: bool = False
    """Accept --loss-chunk-size 0, which holds [tokens, vocabulary] logits."""
    no_loss_checkpoint: bool = False
    """Accepted from the first trainer; the head keeps no logits and recomputes nothing."""
    attn_impl: Literal["auto", "flash_attention_2", "varlen", "sdpa"] = "auto"
    """Attention kernel: flash-attn, torch's varlen_attn, or one SDPA call per document."""
    allow_untested_architecture: bool = False
    """Train a dense model of an architecture that was never compared with plain transformers."""
    recompute_every: int = 1
    """Compute every so many layers again in backward instead of keeping what is inside them; 1 =
    every layer, 0 = none: faster, with more memory."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in pinned host memory until backward."""
    mlp_tiles: int | Literal["auto"] = 0
    """Run each MLP over so many tiles of tokens; 0 = off, auto = tiles as long as the model is
    wide, so that a longer row needs no more memory inside an MLP."""
    liger: Literal["auto", "on", "off"] = "auto"
    """Liger's kernels for norms, rotary embedding and SwiGLU: auto = where they can run."""
    temp_checkpoint_minutes: float = 10.0
    """A temporary checkpoint when so long passed since any save; 0 = off."""
    keep_checkpoints: int = 2
    """Native checkpoints that stay; 0 = all."""
    hf_export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Precision of the exports."""
    keep_generation_config: bool = False
    """Copy the model's generation_config.json into exports."""
    resume: str = "auto"
    """auto (newest whole checkpoint of --out), none, or a checkpoint directory."""
    verify_on_resume: Literal["size", "hash"] = "hash"
    """What is compared with a checkpoint's marker before it is loaded; hash reads every file."""
    allow_change: tuple[str, ...] = ()
    """What a resumed run may change: recipe fields (num_train_steps), data, tokenizer, code."""
    stop_after: int = 0
    """Stop after so many completed steps without changing the schedule; 0 = run to the end."""
    eval_every: int | None = None
    """Evaluate <data>/validation at every label that is a multiple of this and at the last one;
    default: 500 where there is one; 0 = never."""
    log_every: int = 1
    """A console line every so many steps; the last step always."""
    skip_checks: bool = False
    """Skip the start-up proofs."""
    collective_timeout_minutes: float = 30.0
    """A collective that takes longer ends the run."""
    step_timeout_minutes: float = 0.0
    """A step that takes longer prints each rank's stack and ends the run; 0 = ten times the median
    step, at least 30."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: end the run, or drop that update and go on."""
    max_nonfinite: int = 5
    """End the run when so many updates in a row had to be dropped."""
    check_weights_every: int = 100
    """Look for weights that are not finite every so many steps, and before each save; 0 = only
    before saves."""
    wandb_project: str = ""
    """Log to this Weights & Biases project."""
    wandb_name: str = ""
    """Run name; default: the name of the run directory."""
    wandb_id: str = ""
    """Fixed run id; default: one that is kept in the run directory."""
    dry_run: bool = False
    """Print the plan, look into all files that training would read, and stop: exit code 0 or 2."""

    def __post_init__(self) -> None:
        if self.loss_chunk_size == 0 and not self.allow_full_logits:
            raise ConfigError(
                "--loss-chunk-size 0 holds [tokens, vocabulary] logits in float32 (20 GB for 32k "
                "tokens of Qwen3): use 2048, or add --allow-full-logits"
            )
        if self.offload_activations and self.recompute_every == 0:
            raise ConfigError(
                "--offload-activations moves the inputs of recomputed layers, and with "
                "--recompute-every 0 there are none: drop one of the two"
            )
        minimum = {
            "per_device_batch": 1,
            "memory_budget_gb": 0,
            "loss_chunk_size": 0,
            "recompute_every": 0,
            "mlp_tiles": 0,
            "keep_checkpoints": 0,
            "stop_after": 0,
            "log_every": 1,
            "eval_every": 0,
            "temp_checkpoint_minutes": 0,
            "epochs": 0,
            "collective_timeout_minutes": 0.01,
            "step_timeout_minutes": 0,
            "max_nonfinite": 1,
            "check_weights_every": 0,
        }
        for name, low in minimum.items():
            value = getattr(self, name)
            if value not in (None, "auto") and not low <= value <= LARGEST:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}={value} must be from {low} to {LARGEST:,}")

    @property
    def run_dir(self) -> Path:
        """--out. Raises ConfigError when it was not given."""
        if self.out is None:
            raise ConfigError(
                "--out is missing: name the run directory, for example --out runs/one"
            )
        return self.out


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
    name = _peek(argv, "--recipe") or DEFAULT_RECIPE
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
