"""Models with what is known about training them: the Gemma 4 text models of the Eliza tiers.

Owns one frozen table. An entry is a recipe and, beside it, what a recipe has no field for. Its
values are those of the trainer that these models were first trained with; what that does not say
(memory budgets) is left out, never guessed. Leaves the precedence to `flags`: flags win over a
preset, a preset over an entry, an entry over the defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_sft.errors import ConfigError
from ds_sft.recipe.named import RECIPES, named_recipe
from ds_sft.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model to start from, and how it is trained."""

    recipe: Recipe
    """What decides the loss curve."""
    tier: str
    """Name of what the training makes."""
    max_seq_len: int | None = None
    """Length of a pack, in tokens."""
    memory_budget_gb: float | None = None
    """Largest memory of a GPU, in 1e9 bytes."""
    run: Mapping[str, object] = field(default_factory=dict)
    """Other fields of `RunConfig` and their values."""
    unverified: str = ""
    """Why nobody should rely on the entry; empty when its checkpoint is known to be published, in
    an architecture that was compared with plain transformers."""

    def of_training(self) -> dict[str, object]:
        """The fields of `RunConfig` that the entry decides."""
        budget = self.memory_budget_gb
        return {**self.run, **({} if budget is None else {"memory_budget_gb": budget})}

    def of_prepare(self) -> dict[str, object]:
        """The fields of `prepare`'s flags that the entry decides."""
        return {} if self.max_seq_len is None else {"max_seq_len": self.max_seq_len}


def _eliza(model_id: str) -> Recipe:
    """One set of numbers for all sizes: cosine to zero after 3 % warmup, one mean over a step."""
    return Recipe(
        model_id=model_id, learning_rate=2e-4, warmup=0.03, min_lr_ratio=0.0, optimizer="apollo",
        train_batch_size=32, loss_groups=1,
    )  # fmt: skip


_EPOCHS = {"epochs": 3.0}

ENTRIES: dict[str, Entry] = {
    "gemma4-e2b": Entry(
        recipe=_eliza("google/gemma-4-E2B"), tier="eliza-1-2b", max_seq_len=8192, run=_EPOCHS,
    ),
    "gemma4-e4b": Entry(
        recipe=_eliza("google/gemma-4-E4B"), tier="eliza-1-4b", max_seq_len=8192, run=_EPOCHS,
    ),
    "gemma4-12b": Entry(
        recipe=_eliza("google/gemma-4-12B"), tier="eliza-1-9b", max_seq_len=16384, run=_EPOCHS,
    ),
    "gemma4-31b": Entry(
        recipe=_eliza("google/gemma-4-31B"), tier="eliza-1-27b", max_seq_len=65536, run=_EPOCHS,
        unverified="which architecture its config.json names was never seen here",
    ),
}  # fmt: skip


def entry_named(name: str) -> Entry | None:
    """The model entry called `name`; None for the name of a recipe, a file, or an unknown one."""
    return ENTRIES.get(name)


def recipe_named(name: str) -> Recipe:
    """The recipe, or that of the entry, called `name`. Raises ConfigError with those known."""
    if name in RECIPES:
        return named_recipe(name)
    if name not in ENTRIES:
        known = [*RECIPES, *ENTRIES]
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}? Known are" if near else "use"
        raise ConfigError(
            f"recipe {name!r} is not known: {hint} {', '.join(known)}, or a .toml file"
        )
    return ENTRIES[name].recipe


def require_verified(name: str) -> None:
    """Raise ConfigError for an entry that is not verified."""
    entry = ENTRIES.get(name)
    if entry is not None and entry.unverified:
        raise ConfigError(
            f"model entry {name} is unverified: of {entry.recipe.model_id}, {entry.unverified}: "
            "add --allow-unverified, or name the model to start from with --model-id"
        )


def length_notes(name: str, max_seq_len: int) -> list[str]:
    """What is said about packs of another length than the entry called `name` is for."""
    entry = ENTRIES.get(name)
    if entry is None or entry.max_seq_len in (None, max_seq_len):
        return []
    return [
        f"model entry {name} is for packs of {entry.max_seq_len:,} tokens, the data has packs of "
        f"{max_seq_len:,}"
    ]
