"""The recipes of the Marin runs by name, and recipes out of the keys of a TOML file.

The figures are those of the Marin experiment files (`qwen3-8b`: self-instill, 2k steps, learning
rate 5e-6; `qwen3-4b` and `qwen3-1.7b`: OT4, learning rate 2e-5). Leaves reading the file to
`flags`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from ds_sft.errors import ConfigError
from ds_sft.recipe.recipe import Recipe

REFUSED_LEVANTER_FIELDS = ("cycles", "cycle_length", "cooldown", "rewarmup")

_OT4 = {
    "chat_template": "qwen3", "learning_rate": 2e-5, "weight_decay": 0.0, "warmup": 0.03,
    "decay": 0.9, "max_grad_norm": 0.2, "train_batch_size": 128, "mixture_block_size": 32768,
}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    "qwen3-8b": Recipe(
        model_id="Qwen/Qwen3-8B", chat_template="qwen3", learning_rate=5e-6, weight_decay=0.01,
        warmup=0.05, decay=0.9, train_batch_size=64, num_train_steps=2000,
        mixture_block_size=32768,
    ),
    "qwen3-4b": Recipe(model_id="Qwen/Qwen3-4B", **_OT4),  # type: ignore[arg-type]
    "qwen3-1.7b": Recipe(model_id="Qwen/Qwen3-1.7B", **_OT4),  # type: ignore[arg-type]
}  # fmt: skip


def recipe_from_mapping(values: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from the keys of a TOML file named `where`; `base` names a recipe to start from.

    Raises ConfigError for an unknown key, a value of the wrong type, and Levanter's fields that we
    do not have (cycles, cooldown).
    """
    types = {f.name: str(f.type) for f in dataclasses.fields(Recipe)}
    values = dict(values)
    base = values.pop("base", None)
    # Levanter writes `decay: null` for "all that remains"; the field's default says the same.
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if key in REFUSED_LEVANTER_FIELDS:
            raise ConfigError(
                f"{where}: `{key}` is not supported: ds_sft runs one warmup/decay cycle"
            )
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(types)}"
            raise ConfigError(f"{where}: unknown key `{key}`: {hint}")
        if not _fits(value, types[key]):
            raise ConfigError(f"{where}: {key}={value!r} must be of type {types[key]}")
    if base is not None:
        return named_recipe(base).replace(**values)
    missing = [n for n in ("model_id", "learning_rate", "train_batch_size") if n not in values]
    if missing:
        raise ConfigError(f'{where}: {", ".join(missing)} missing: give it, or base = "qwen3-8b"')
    return Recipe(**values)


def named_recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ConfigError with the known names."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ConfigError(f"recipe {name!r} is not known: use {', '.join(RECIPES)}")
    return RECIPES[name]


def _fits(value: object, annotation: str) -> bool:
    if isinstance(value, bool):
        return False
    plain = annotation.removesuffix(" | None")
    accepted = {"int": (int,), "str": (str,)}.get(plain, (int, float))
    return isinstance(value, accepted)
