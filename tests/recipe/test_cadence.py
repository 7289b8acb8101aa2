import json
from pathlib import Path

import pytest

from ds_sft.recipe.cadence import due_after, is_due, labels, timer_fired
from ds_sft.recipe.recipe import Recipe

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/step_labels.json").read_text())


def numbers(names: list[str]) -> set[int]:
    return {int(name.removeprefix("step-")) for name in names}


@pytest.mark.parametrize("case", GOLDEN["A_real_trainer"], ids=lambda c: str(c["num_train_steps"]))
def test_export_labels_are_those_of_the_real_trainer_plus_a_run_of_one_step(case):
    ours = set(labels(case["num_train_steps"], case["hf_every"]))
    assert ours == numbers(case["hf_exports_in_order"]) | {case["num_train_steps"] - 1}


@pytest.mark.parametrize("case", GOLDEN["A_real_trainer"], ids=lambda c: str(c["num_train_steps"]))
def test_checkpoint_labels_are_levanters_plus_the_last_one(case):
    ours = set(labels(case["num_train_steps"], case["checkpoint_every"]))
    theirs = numbers(case["native_checkpoints_on_disk"])
    assert ours == theirs | {case["num_train_steps"] - 1}


def test_labels_and_is_due_agree():
    for steps, every in [(1, 1), (2, 5), (12, 5), (101, 10), (2000, 100)]:
        assert labels(steps, every) == [i for i in range(steps) if is_due(i, steps, every)]


@pytest.mark.parametrize("case", GOLDEN["B_time_based"], ids=lambda c: f"every{c['keep_every']}")
def test_temporary_checkpoints_follow_levanters_timer(case):
    """The old temporary goes when the next save is committed; every save resets the timer."""
    recipe = Recipe(model_id="m", learning_rate=1.0, train_batch_size=2,
                    steps_per_checkpoint=case["keep_every"])  # fmt: skip
    last_save, permanent, temporary = 0.0, set(), set()
    for row in case["per_step"]:
        now = row["label"] * case["minutes_per_step"] * 60.0
        fired = timer_fired(now, last_save, case["save_interval_min"])
        # A run without end: Levanter's hook does not know the last label.
        due = due_after(row["label"] + 1, 10**9, recipe, timer_fired=fired)
        if due.checkpoint or due.temporary:
            last_save, temporary = now, set()
            (permanent if due.checkpoint else temporary).add(due.label)
        expected = {
            int(k.removeprefix("step-")): v for k, v in row["on_disk(label->is_temporary)"].items()
        }
        assert permanent == {k for k, is_temp in expected.items() if not is_temp}
        assert temporary == {k for k, is_temp in expected.items() if is_temp}


def test_timer_can_be_switched_off():
    assert not timer_fired(1e9, 0.0, 0)
