"""`ds-sft recipes`: the named recipes and model entries, as a table or as JSON.

Owns how they look. What they are is in `recipe.recipe` and `recipe.entries`. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

from ds_sft.recipe.entries import ENTRIES
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe

_COLUMNS = ("id", "model", "tier", "length", "optimizer", "budget", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesFlags:
    """List what --recipe takes by name: recipes, and models with what is known about them."""

    json: bool = False
    """Print one JSON object, with every field of every recipe."""


def run(flags: RecipesFlags) -> None:
    """`ds-sft recipes`."""
    if flags.json:
        print(json.dumps(facts(), indent=2))
    else:
        _show([_cells(name, said) for name, said in facts().items()])


def facts() -> dict[str, dict[str, Any]]:
    """Everything that is listed, by id; null where nothing is known."""
    listed = {name: _facts(recipe) for name, recipe in RECIPES.items()}
    for name, entry in ENTRIES.items():
        listed[name] = _facts(entry.recipe) | {
            "kind": "model entry",
            "tier": entry.tier,
            "max_seq_len": entry.max_seq_len,
            "memory_budget_gb": entry.memory_budget_gb,
            "verified": not entry.unverified,
            "unverified_because": entry.unverified or None,
            "run": dict(entry.run),
        }
    return listed


def _facts(recipe: Recipe) -> dict[str, Any]:
    return {
        "kind": "recipe",
        "model_id": recipe.model_id,
        "tier": None,
        "max_seq_len": None,
        "optimizer": recipe.optimizer,
        "memory_budget_gb": None,
        "verified": True,
        "unverified_because": None,
        "recipe": dataclasses.asdict(recipe),
        "run": {},
    }


def _cells(name: str, said: dict[str, Any]) -> list[str]:
    length, budget = said["max_seq_len"], said["memory_budget_gb"]
    return [
        name,
        said["model_id"],
        said["tier"] or "",
        "" if length is None else f"{length:,}",
        said["optimizer"],
        "" if budget is None else f"{budget:g} GB",
        "yes" if said["verified"] else "no",
    ]


def _show(rows: list[list[str]]) -> None:
    unverified = [
        f"{name} is unverified ({entry.unverified}): it takes --allow-unverified"
        for name, entry in ENTRIES.items()
        if entry.unverified
    ]
    if not sys.stdout.isatty():  # for other programs: a line a row, columns by tabs
        print("\n".join("\t".join(row) for row in [list(_COLUMNS), *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    for line in unverified:
        console.print(line)
