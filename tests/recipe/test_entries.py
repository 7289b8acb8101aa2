import dataclasses

import pytest

from ds_sft.errors import ConfigError
from ds_sft.recipe import entries
from ds_sft.recipe.entries import ENTRIES, length_notes, recipe_named, require_verified
from ds_sft.recipe.named import RECIPES
from ds_sft.run_config import RunConfig


def test_tiers_and_lengths_are_those_that_are_known_and_no_budget_is() -> None:
    assert {e.tier: e.max_seq_len for e in ENTRIES.values()} == {
        "eliza-1-2b": 8192, "eliza-1-4b": 8192, "eliza-1-9b": 16384, "eliza-1-27b": 65536,
    }  # fmt: skip
    assert [name for name, e in ENTRIES.items() if e.memory_budget_gb is not None] == []
    assert {e.recipe.model_id for e in ENTRIES.values()} == {
        f"google/gemma-4-{size}" for size in ("E2B", "E4B", "12B", "31B")
    }


def test_every_entry_trains_with_the_numbers_of_its_first_trainer() -> None:
    for entry in ENTRIES.values():
        r = entry.recipe
        assert (r.learning_rate, r.weight_decay, r.warmup, r.decay) == (2e-4, 0.0, 0.03, None)
        assert (r.lr_schedule, r.min_lr_ratio, r.max_grad_norm) == ("cosine", 0.0, 1.0)
        assert (r.optimizer, r.train_batch_size, r.loss_groups) == ("apollo", 32, 1)
        assert entry.of_training() == {"epochs": 3.0}


def test_an_entry_decides_fields_that_exist_and_no_name_is_taken_twice() -> None:
    fields = {f.name for f in dataclasses.fields(RunConfig)}
    for entry in ENTRIES.values():
        assert entry.of_training().keys() <= fields
    assert ENTRIES.keys() & RECIPES.keys() == set()
    assert recipe_named("qwen3-8b") is RECIPES["qwen3-8b"]
    assert recipe_named("gemma4-e2b") is ENTRIES["gemma4-e2b"].recipe
    with pytest.raises(ConfigError, match=r"'llama' is not known: use qwen3-8b.*gemma4-e2b.*toml"):
        recipe_named("llama")


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen3-8B", "qwen3-8b"), ("gemma4-e2", "gemma4-e2b"), ("Qwen3-1.7", "qwen3-1.7b")],
)  # fmt: skip
def test_a_near_name_is_offered(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"is not known: did you mean {near}\\? Known are qwen3"):
        recipe_named(name)


def test_an_unverified_entry_says_why_and_what_to_do() -> None:
    assert [name for name, e in ENTRIES.items() if e.unverified] == ["gemma4-31b"]
    with pytest.raises(ConfigError, match=r"gemma4-31b is unverified: .*--allow-unverified.*model"):
        require_verified("gemma4-31b")
    for name in ("gemma4-e2b", "qwen3-8b", "mine.toml"):
        require_verified(name)


def test_a_budget_that_is_known_is_a_field_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dataclasses.replace(ENTRIES["gemma4-e2b"], memory_budget_gb=38.5)
    monkeypatch.setitem(entries.ENTRIES, "gemma4-e2b", known)
    assert known.of_training() == {"epochs": 3.0, "memory_budget_gb": 38.5}


def test_packs_of_another_length_are_noted() -> None:
    (note,) = length_notes("gemma4-12b", 4096)
    assert "is for packs of 16,384 tokens, the data has packs of 4,096" in note
    assert length_notes("gemma4-12b", 16384) == length_notes("qwen3-8b", 64) == []
