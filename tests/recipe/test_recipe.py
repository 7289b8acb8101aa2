import pytest

from ds_sft.errors import ConfigError
from ds_sft.recipe import low_rank
from ds_sft.recipe.named import RECIPES, recipe_from_mapping

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
        ({**MINIMAL, "optimizer": "adam"}, "use adamw, apollo, apollo-mini"),
        ({**MINIMAL, "apollo_rank": 8}, "apollo_rank=8 means nothing to optimizer=adamw"),
        ({**MINIMAL, "apollo_scale": 2.0}, "apollo_scale=2.0 means nothing"),
        ({**MINIMAL, "apollo_update_proj_gap": 9}, "apollo_update_proj_gap=9 means nothing"),
        ({**MINIMAL, "optimizer": "apollo", "apollo_rank": 0}, "apollo_rank=0"),
        ({**MINIMAL, "optimizer": "apollo", "apollo_rank": 1.5}, "must be of type int"),
        ({**MINIMAL, "optimizer": "apollo", "apollo_scale": float("nan")}, "apollo_scale=nan"),
        ({**MINIMAL, "optimizer": "apollo", "apollo_update_proj_gap": -1}, "proj_gap=-1"),
        (
            {**MINIMAL, "optimizer": "apollo", "optimizer_state_dtype": "bfloat16"},
            "use optimizer_state_dtype=float32",
        ),
    ],
)  # fmt: skip
def test_a_bad_recipe_is_refused_in_one_line(values, words):
    with pytest.raises(ConfigError) as caught:
        recipe_from_mapping(values, "my.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "rank", "scale", "gap", "tensor_wise"),
    [
        ({"optimizer": "apollo"}, 256, 1.0, 200, False),
        ({"optimizer": "apollo-mini"}, 1, 128.0, 200, True),
        ({"optimizer": "apollo-mini", "apollo_rank": 2, "apollo_scale": 64}, 2, 64.0, 200, True),
        ({"optimizer": "apollo", "apollo_update_proj_gap": 5}, 256, 1.0, 5, False),
    ],
)
def test_apollo_fills_in_its_own_defaults(values, rank, scale, gap, tensor_wise):
    recipe = recipe_from_mapping({**MINIMAL, **values}, "my.toml")
    said = recipe.apollo
    assert (said.rank, said.scale, said.update_proj_gap, said.tensor_wise) == (
        rank, scale, gap, tensor_wise,
    )  # fmt: skip
    resolved = recipe.resolved()
    assert (resolved.apollo_rank, resolved.apollo_scale, resolved.apollo_update_proj_gap) == (
        rank, scale, gap,
    )  # fmt: skip
    assert resolved.apollo == said


def test_adamw_has_no_apollo_settings():
    recipe = recipe_from_mapping(MINIMAL, "my.toml")
    assert recipe.apollo is None
    assert recipe.resolved() == recipe


def test_a_recipe_says_what_keeps_it_from_levanters_curve():
    assert [recipe.departures for recipe in RECIPES.values()] == [[]] * len(RECIPES)
    both = RECIPES["qwen3-8b"].replace(master_dtype="bfloat16", optimizer_state_dtype="bfloat16")
    assert len(both.departures) == 2
    one = {"w": (1,)}
    sizes = [low_rank.checkpoint_bytes(one, recipe) for recipe in (RECIPES["qwen3-8b"], both)]
    assert sizes == [12, 6]
    mini = RECIPES["qwen3-8b"].replace(optimizer="apollo-mini")
    assert mini.departures == ["the optimizer is apollo-mini"]
