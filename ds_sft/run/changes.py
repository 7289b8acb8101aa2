"""What changed since the checkpoint that a run goes on from. No torch.

Owns the comparison of a checkpoint's meta.json with the run. Invariant: a checkpoint that is taken
gives the numbers of the uninterrupted run; anything that would change them is an error that lists
old and new values, unless `--allow-change` names it. Another number of ranks, offload or sub-group
size moves no loss beyond rounding and is allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Any

import ds_sft
from ds_sft.errors import CheckpointError, ConfigError
from ds_sft.recipe.recipe import Recipe
from ds_sft.recipe.schedule import Schedule
from ds_sft.run.marker import META_NAME
from ds_sft.run.resume import ResumePoint

# When something is saved, and where the model came from, move no loss.
FREE_FIELDS = ("steps_per_checkpoint", "steps_per_hf_export", "model_id", "chat_template")
ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
# Of config.json: what a forward pass does not read.
FREE_CONFIG = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
PACKAGES = (
    "ds-sft", "deepspeed", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy",
    "flash-attn", "liger-kernel",
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
FREE_AT_THE_END = ("code", "tokenizer")  # of a finished run that is started again: no step follows
STATE_FIELDS = ("optimizer", "apollo_rank")  # what an optimizer's state is made of
DIGITS = 12  # of a hash, for a person to compare


def fingerprint(data_sha256: str, tokenizer_dir: Path | None) -> dict[str, str]:
    """What a run's numbers and exports depend on besides the recipe, each in one short text."""
    tokenizer = "" if tokenizer_dir is None else tokenizer_version(tokenizer_dir)
    return {"data": data_sha256[:DIGITS], "tokenizer": tokenizer, "code": code_version()}


def tokenizer_version(directory: Path) -> str:
    """The files of a tokenizer, the chat template among them, as a short hash."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            digest.update(name.encode() + (directory / name).read_bytes())
    return digest.hexdigest()[:DIGITS]


@cache
def code_version() -> str:
    """The version of ds_sft with a hash of its source, which a checkout changes in silence."""
    digest = hashlib.sha256()
    root = Path(ds_sft.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{ds_sft.__version__}-{digest.hexdigest()[:DIGITS]}"


def package_versions() -> dict[str, str]:
    """The packages that compute, with their versions; one that is not installed is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_fields(names: tuple[str, ...]) -> None:
    """Raise ConfigError for an --allow-change that names no field."""
    known = {"model", *fingerprint("", None), *(f.name for f in dataclasses.fields(Recipe))}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConfigError(
            f"--allow-change {unknown[0]} is no field: use {', '.join(sorted(known))}"
        )


def check(
    point: ResumePoint,
    recipe: Recipe,
    *,
    world_size: int,
    now: dict[str, str],
    model_config: dict[str, Any] | None,
    allow_change: tuple[str, ...],
) -> list[str]:
    """Compare a checkpoint with the run, whose `fingerprint` is `now`; a line per allowed change.

    Raises CheckpointError when the checkpoint is of another model, ConfigError when something
    differs that `allow_change` does not name.
    """
    meta, where = point.meta, point.path
    needed = ("model", "world_size", "data_manifest_sha256", "recipe")
    missing = [k for k in needed if k not in meta]
    if missing:
        raise CheckpointError(f"{where / META_NAME} lacks {missing[0]}: it is not a whole marker")
    old = {"data": meta["data_manifest_sha256"][:DIGITS], **meta.get("fingerprint", {})}
    old |= {"optimizer": "adamw", "apollo_rank": None, **meta["recipe"]}
    new = {**now, **dataclasses.asdict(recipe)}
    if model_config is not None:
        trained_from = meta["model"].get("config.json", {})
        _check_architecture(where, trained_from, model_config)
        old["model"], new["model"] = _other_config(trained_from, model_config)
    _check_state(where, old, new)
    # An empty text is not known yet: the tokenizer of a model that is still on the Hub.
    changed = [n for n in new if n in old and new[n] not in (old[n], "") and n not in FREE_FIELDS]
    free = FREE_AT_THE_END if point.is_end and point.completed == recipe.num_train_steps else ()
    refused = [n for n in changed if n not in (*allow_change, *free)]
    if refused:
        listed = "; ".join(f"{n} was {old[n]} and is {new[n]} now" for n in refused)
        raise ConfigError(
            f"not the run of {where}: {listed}: use what it was, or "
            f"--allow-change {' '.join(refused)}"
        )
    lines = [f"{name} changes from {old[name]} to {new[name]}" for name in changed]
    lines += _lines_about_the_rest(point, world_size)
    changed_recipe = [name for name in changed if name in meta["recipe"]]
    if changed_recipe:
        before = recipe.replace(**{name: old[name] for name in changed_recipe})
        step = point.completed
        lines.append(
            f"learning rate of step {step}: {_lr(before, step):.6g} before the change, "
            f"{_lr(recipe, step):.6g} now"
        )
    return lines


def _check_state(where: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse, whatever is allowed, to go on with an optimizer that cannot read the state."""
    before, now = (
        f"--optimizer {f['optimizer']}" + (f" --apollo-rank {f['apollo_rank']}"
                                           if f["apollo_rank"] else "")
        for f in (old, new)
    )  # fmt: skip
    if any(old[name] != new[name] for name in STATE_FIELDS):
        raise ConfigError(
            f"{where} holds the state of {before}, which {now} cannot go on from: use {before}, or "
            "another --out with its export as --model-id"
        )


def _lines_about_the_rest(point: ResumePoint, world_size: int) -> list[str]:
    """What differs and needs no permission."""
    meta, now = point.meta, package_versions()
    lines = [
        f"{name} changes from {version} to {now.get(name, 'nothing')}"
        for name, version in meta.get("versions", {}).items()
        if now.get(name) != version
    ]
    if meta["world_size"] != world_size:
        lines.append(
            f"{point.path} was written by {meta['world_size']} ranks, {world_size} read it"
        )
    return lines


def _lr(recipe: Recipe, step: int) -> float:
    """Learning rate that a recipe with its number of steps gives `step`."""
    return recipe.learning_rate * Schedule.from_recipe(recipe, 0).lr_multiplier(step)


def _check_architecture(where: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key in ARCHITECTURE:
        if old.get(key) != new.get(key):
            raise CheckpointError(
                f"{where} is of another model: {key} is {old.get(key)} there and {new.get(key)} "
                "in --model-id: use the model that it was trained from, or another --out"
            )


def _other_config(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
    """The entries of two config.json that differ and that a forward pass reads, on either side."""
    names = [n for n in sorted({*old, *new}) if n not in FREE_CONFIG and old.get(n) != new.get(n)]
    before, after = (", ".join(f"{n}={c.get(n)}" for n in names) for c in (old, new))
    return before, after
