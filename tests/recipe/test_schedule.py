import json
from pathlib import Path

import pytest

from ds_sft.errors import ConfigError
from ds_sft.recipe.named import recipe_from_mapping
from ds_sft.recipe.recipe import Recipe
from ds_sft.recipe.schedule import Schedule

CASES = json.loads((Path(__file__).parents[1] / "golden/lr_schedules.json").read_text())["cases"]
REFUSED = ("cycle_length", "cooldown", "cycles")


def values(case: dict) -> dict:
    names = ("learning_rate", "warmup", "decay", "min_lr_ratio", "lr_schedule", "num_train_steps")
    given = {name: case[name] for name in names}
    given |= {name: case[name] for name in REFUSED if name in case}
    return {"model_id": "m", "train_batch_size": 2, **given}


def target(case: dict) -> list[float] | None:
    """Levanter's later version, which clamps warmup and decay, is the one we follow."""
    newer = case["lr_marin_newer"]
    return case.get("lr") if newer == "same" else newer


@pytest.mark.parametrize("case", CASES, ids=[c["tag"] for c in CASES])
def test_lr_is_levanters_at_every_golden_step(case):
    if any(name in case for name in REFUSED):
        with pytest.raises(ConfigError, match="not supported"):
            recipe_from_mapping(values(case), "r.toml")
    elif target(case) is None:
        with pytest.raises(ConfigError, match="neither a fraction"):
            Schedule.from_recipe(Recipe(**values(case)), num_packs=1)
    else:
        schedule = Schedule.from_recipe(Recipe(**values(case)), num_packs=1)
        peak = case["learning_rate"]
        for step, lr in zip(case["steps"], target(case), strict=True):
            assert abs(schedule.lr_multiplier(step) - lr / peak) <= 2e-7, step


def test_golden_file_covers_all_shapes_and_refusals():
    compared = [c for c in CASES if target(c) and not any(n in c for n in REFUSED)]
    assert len(compared) >= 30
    assert {c["lr_schedule"] for c in compared} == {
        "cosine",
        "linear",
        "constant",
        "inv_sqrt",
        "inv",
    }


def test_lr_is_zero_at_step_zero_only_with_a_warmup_step():
    recipe = Recipe(model_id="m", learning_rate=1.0, train_batch_size=2, warmup=0.05, decay=0.9)
    assert Schedule.from_recipe(recipe.replace(num_train_steps=20), 1).lr_multiplier(0) == 0.0
    assert Schedule.from_recipe(recipe.replace(num_train_steps=19), 1).lr_multiplier(0) == 1.0


def test_steps_default_to_eight_epochs_of_packs_rounded_up():
    recipe = Recipe(model_id="m", learning_rate=1.0, train_batch_size=6)
    assert recipe.steps(num_packs=10) == 14
    assert Schedule.from_recipe(recipe, num_packs=10).num_steps == 14


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
def test_a_duration_that_is_neither_fraction_nor_steps_is_refused(bad):
    recipe = Recipe(model_id="m", learning_rate=1.0, train_batch_size=2, warmup=bad)
    with pytest.raises(ConfigError, match="warmup="):
        Schedule.from_recipe(recipe, num_packs=10)
