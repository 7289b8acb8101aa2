import pytest

from ds_sft.errors import ConfigError
from ds_sft.recipe.recipe import RECIPES, recipe_from_mapping

MINIMAL = {"model_id": "m", "learning_rate": 1e-5, "train_batch_size": 4}


def test_named_recipes_hold_the_marin_figures():
    r = RECIPES["qwen3-8b"]
    assert (r.learning_rate, r.weight_decay, r.warmup, r.decay) == (5e-6, 0.01, 0.05, 0.9)
    assert (r.min_lr_ratio, r.max_grad_norm, r.beta1, r.beta2, r.eps) == (
        0.1,
        1.0,
        0.9,
        0.999,
        1e-8,
    )
    assert (r.train_batch_size, r.num_train_steps) == (64, 2000)
    for name in ("qwen3-4b", "qwen3-1.7b"):
        r = RECIPES[name]
        assert (r.learning_rate, r.weight_decay, r.warmup, r.max_grad_norm) == (
            2e-5,
            0.0,
            0.03,
            0.2,
        )
        assert (r.train_batch_size, r.num_train_steps) == (128, 0)
    assert all(
        (r.steps_per_checkpoint, r.steps_per_hf_export) == (20, 100) for r in RECIPES.values()
    )
    assert all(r.mixture_block_size == 32768 for r in RECIPES.values())
    assert all(r.loss_groups == 2 and r.chat_template == "qwen3" for r in RECIPES.values())


def test_toml_keys_override_a_base_recipe():
    recipe = recipe_from_mapping({"base": "qwen3-8b", "learning_rate": 1e-4}, "my.toml")
    assert recipe == RECIPES["qwen3-8b"].replace(learning_rate=1e-4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**MINIMAL, "learning_rat": 1}, "did you mean `learning_rate`"),
        ({**MINIMAL, "cycles": 3}, "`cycles` is not supported"),
        ({**MINIMAL, "cooldown": 0.1}, "`cooldown` is not supported"),
        ({**MINIMAL, "warmup": "10%"}, "must be of type"),
        ({**MINIMAL, "train_batch_size": 4.5}, "must be of type int"),
        ({"base": "qwen9"}, "qwen3-8b"),
        ({"model_id": "m"}, "learning_rate, train_batch_size missing"),
        ({**MINIMAL, "learning_rate": float("nan")}, "learning_rate=nan"),
        ({**MINIMAL, "learning_rate": 0.0}, "learning_rate=0.0"),
        ({**MINIMAL, "weight_decay": -0.1}, "weight_decay=-0.1"),
        ({**MINIMAL, "max_grad_norm": -1}, "max_grad_norm=-1"),
        ({**MINIMAL, "beta2": 1.0}, "beta2=1.0"),
        ({**MINIMAL, "eps": 0}, "eps=0"),
        ({**MINIMAL, "min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
        ({**MINIMAL, "steps_per_checkpoint": 0}, "steps_per_checkpoint=0"),
        ({**MINIMAL, "steps_per_hf_export": -1}, "steps_per_hf_export=-1"),
        ({**MINIMAL, "lr_schedule": "cosin"}, "lr_schedule='cosin'"),
        ({**MINIMAL, "lr_schedule": "inv", "min_lr_ratio": 0}, "min_lr_ratio above 0"),
        ({**MINIMAL, "compute_dtype": "float16"}, "compute_dtype='float16'"),
        ({**MINIMAL, "compute_dtype": "float32", "grad_reduce_dtype": "bfloat16"}, "loses"),
        ({**MINIMAL, "compute_dtype": "float32", "master_dtype": "bfloat16"}, "masters cannot"),
        ({**MINIMAL, "optimizer_state_dtype": "bfloat16"}, "add --master-dtype bfloat16"),
        ({**MINIMAL, "master_dtype": "float16"}, "use bfloat16, float32"),
        ({**MINIMAL, "loss_groups": 3}, "3 loss groups: use 3 or 6"),
        ({**MINIMAL, "mixture_block_size": 65536}, "use 1 to 65535"),
        ({**MINIMAL, "order": "levanter-era"}, "needs the number of Levanter's `shuffle`"),
        ({**MINIMAL, "order": "shuffle", "era_length": 5}, "no other order takes one"),
        ({**MINIMAL, "order": "levanter-era", "era_length": -5}, "era_length=-5"),
        ({**MINIMAL, "order": "levanter-era", "era_length": 1}, "use 2 to 2^40"),
    ],
)  # fmt: skip
def test_a_bad_recipe_is_refused_in_one_line(values, words):
    with pytest.raises(ConfigError) as caught:
        recipe_from_mapping(values, "my.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_says_what_keeps_it_from_levanters_curve():
    assert [recipe.departures for recipe in RECIPES.values()] == [[]] * len(RECIPES)
    both = RECIPES["qwen3-8b"].replace(master_dtype="bfloat16", optimizer_state_dtype="bfloat16")
    assert len(both.departures) == 2
    assert (RECIPES["qwen3-8b"].state_bytes, both.state_bytes) == (12, 6)
