import math
from pathlib import Path
from typing import Any

import families
import pytest

from ds_sft.data.architectures import (
    TESTED_ARCHITECTURES,
    check_architecture,
    expected_buffers,
    expected_shapes,
    text_part,
    unused_tensors,
)
from ds_sft.data.geometry import (
    DEFAULTS,
    completed,
    head_sizes,
    layers,
    note_large_heads,
    width_times_context,
)
from ds_sft.errors import ConfigError

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


OLMO = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", **SIZES}


def test_qwen3_8b_has_its_published_size() -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    shapes = expected_shapes(config, tied=False)
    assert sum(math.prod(shape) for shape in shapes.values()) == 8_190_735_360


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("Qwen3", {"head_dim": 16}),
        ("Qwen3", {"head_dim": 8, "attention_bias": True}),
        ("Llama", {}),
        ("Llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
        ("Llama", {"num_key_value_heads": 4}),
    ],
)
def test_names_and_shapes_are_those_of_transformers(
    name: str, extra: dict[str, Any], tied: bool
) -> None:
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **extra, "tie_word_embeddings": tied}
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ours = {**config.to_dict(), "architectures": [f"{name}ForCausalLM"]}
    assert expected_shapes(ours, tied) == theirs


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_tensors_and_layers_of_every_family_are_those_of_transformers(
    family: str, tied: bool
) -> None:
    model = families.make(family, tied)
    saved = model.config.to_dict()
    config = {**saved, "architectures": [families.FAMILIES[family][1]]}
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert expected_shapes(config, tied) == theirs
    stored = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in theirs}
    assert expected_buffers(config) == {n: s for n, s in stored.items() if n != "lm_head.weight"}
    for ours, layer in zip(layers(config), model.model.layers, strict=True):
        attn = layer.self_attn
        assert (ours.head, ours.window) == (attn.head_dim, getattr(attn, "sliding_window", None))
        assert ours.kv_heads * attn.num_key_value_groups == ours.heads
        assert ours.inner == layer.mlp.gate_proj.out_features
        assert ours.shares_kv is not hasattr(attn, "k_proj")


def published(**changes: Any) -> dict[str, Any]:
    """What a published config.json of Gemma 4 says about its text part."""
    return {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 1536,
        "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "global_head_dim": 512, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "layer_types": ([*["sliding_attention"] * 4, "full_attention"] * 7), **changes,
    }  # fmt: skip


def test_a_published_config_without_its_defaults_is_read_as_transformers_reads_it() -> None:
    import transformers

    raw = published()
    config = transformers.Gemma4TextConfig(
        **{k: v for k, v in raw.items() if k not in ("architectures", "model_type")}
    )
    assert layers(completed(raw)) == layers({**config.to_dict(), "architectures": ["x"]})
    assert head_sizes(completed(raw)) == [256, 512]
    assert [layer.inner for layer in layers(completed(raw))] == [6144] * 15 + [12288] * 20
    assert len(unused_tensors(completed(raw))) == 4 * 20


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gemma3_text", "Gemma3TextConfig"),
        ("gemma4_text", "Gemma4TextConfig"),
        ("gemma4_unified_text", "Gemma4UnifiedTextConfig"),
        ("qwen2", "Qwen2Config"),
        ("qwen3", "Qwen3Config"),
    ],
)
def test_what_is_filled_in_is_what_transformers_fills_in(model_type: str, name: str) -> None:
    import transformers

    config = getattr(transformers, name)
    windowed = {"use_sliding_window": True} if model_type.startswith("qwen") else {}
    theirs = config(**windowed).to_dict()
    assert {key: theirs[key] for key in DEFAULTS[model_type]} == DEFAULTS[model_type]
    assert completed({"model_type": model_type, "vocab_size": 7})["vocab_size"] == 7
    assert completed({"model_type": "llama"}) == {"model_type": "llama"}


LEFT_OUT = {
    "qwen2.5": ["num_key_value_heads", "sliding_window", "use_sliding_window"],
    "qwen2.5-window": ["num_key_value_heads", "sliding_window", "max_window_layers", "layer_types"],
    "qwen3": ["head_dim", "num_key_value_heads", "layer_types"],
    "llama3": ["head_dim", "num_key_value_heads"],
    "gemma3": ["head_dim", "layer_types", "sliding_window"],
    "gemma4": ["num_kv_shared_layers", "head_dim", "per_layer_config"],
}
NULL = {
    "qwen2.5-window": ["num_key_value_heads", "layer_types"],
    "qwen3": ["head_dim", "num_key_value_heads", "layer_types"],
    "llama3": ["head_dim", "num_key_value_heads"],
    "gemma3": ["head_dim", "num_key_value_heads", "layer_types"],
    "gemma4-e": ["num_kv_shared_layers", "hidden_size_per_layer_input", "head_dim"],
}


def as_transformers(family: str, config: dict[str, Any]) -> Any:
    """Shapes and windows of the model that transformers makes; None where it refuses."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    config_name, name, _ = families.FAMILIES[family]
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)(
                getattr(transformers, config_name).from_dict(config)
            )
    except (StrictDataclassError, ValueError, TypeError):
        return None
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    attention = [layer.self_attn for layer in model.model.layers]
    return shapes, [getattr(attn, "sliding_window", None) for attn in attention]


def as_read_here(family: str, config: dict[str, Any]) -> Any:
    """The same from config.json alone; None where it is refused."""
    whole = completed({**config, "architectures": [families.FAMILIES[family][1]]})
    tied = bool(whole.get("tie_word_embeddings", False))
    try:
        return expected_shapes(whole, tied), [layer.window for layer in layers(whole)]
    except ConfigError:
        return None


@pytest.mark.parametrize(
    ("family", "key"), [(f, key) for f, keys in LEFT_OUT.items() for key in keys]
)
def test_a_key_that_is_left_out_is_what_transformers_makes_of_it(family: str, key: str) -> None:
    config = families.config_of(family).to_dict()
    config.pop(key, None)
    found = as_transformers(family, config)
    assert found is not None
    assert as_read_here(family, config) == found


@pytest.mark.parametrize(("family", "key"), [(f, key) for f, keys in NULL.items() for key in keys])
def test_a_null_is_refused_where_transformers_refuses_it(family: str, key: str) -> None:
    config = {**families.config_of(family).to_dict(), key: None}
    assert as_read_here(family, config) == as_transformers(family, config)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2.5", {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False}),
        ("qwen3", {"layer_types": ["full_attention"] * 3}),
        ("gemma4-e", {"layer_types": [*["sliding_attention"] * 3, "full_attention"],
                      "per_layer_config": None}),
        ("gemma4-e", {"num_kv_shared_layers": 3}),
        ("gemma4", {"layer_types": ["full_attention"] * 4}),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_read_as_transformers_reads_them(
    family: str, changes: dict[str, Any]
) -> None:
    config = {**families.config_of(family).to_dict(), **changes}
    assert as_read_here(family, config) == as_transformers(family, config)


def test_heads_that_no_varlen_kernel_takes_are_refused_or_said() -> None:
    sizes = head_sizes(completed(published()))
    for asked in ("flash_attention_2", "varlen"):
        with pytest.raises(ConfigError, match=f"--attn-impl {asked} takes heads of up to 256"):
            note_large_heads(asked, sizes)
    (note,) = note_large_heads("auto", sizes)
    assert "heads of 512 run on sdpa" in note
    assert note_large_heads("sdpa", sizes) == note_large_heads("auto", [64, 256]) == []


def test_work_inside_a_window_is_counted_by_hand() -> None:
    config = completed(published(layer_types=None, num_hidden_layers=6, num_kv_shared_layers=0))
    lengths = [100, 700]
    pairs = 0
    for layer in layers(config):
        seen = sum(min(i + 1, layer.window or n) for n in lengths for i in range(n))
        pairs += layer.heads * layer.head * (2 * seen - sum(lengths))  # half of one's own token
    got = width_times_context(config, lengths) * sum(lengths)
    assert got == pytest.approx(pairs, rel=2e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "mixture of experts"),
        ({"architectures": ["Gemma4ForCausalLM"], "enable_moe_block": True}, "mixture of experts"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "not a text model"),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}, "not a text"),
        ({"architectures": ["Qwen2VLForCausalLM"], "text_config": {}}, "not a text model"),
        ({"architectures": ["OddForCausalLM"], "auto_map": {}}, "code from its own repository"),
        ({**OLMO, "logit_scale": 0.5}, "logit_scale=0.5"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not a text model"),
        ({**OLMO, "intermediate_size": None, "model_type": None}, "no model_type, intermediate_s"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "dynamic"}},
         "rope_type dynamic depends on the longest position"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "causal"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}, "softcapping"),
        ({"architectures": ["OddForCausalLM"], "layer_types": ["linear_attention"]}, "linear_att"),
        ({"architectures": ["LlamaForCausalLM"], "attention_dropout": 0.1}, "attention_drop"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_rightly_is_refused_whatever_is_allowed(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_architecture(Path("m"), config, allow_untested=True)


def test_an_untested_architecture_says_what_to_check_and_can_be_allowed() -> None:
    config = {**OLMO, "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(ConfigError, match=r"Olmo2ForCausalLM is not tested.*packed documents do"):
        check_architecture(Path("m"), config)
    check_architecture(Path("m"), config, allow_untested=True)
    for name, model_type in TESTED_ARCHITECTURES.items():
        check_architecture(Path("m"), {"architectures": [name], "model_type": model_type})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Qwen3_5ForCausalLM", "use Qwen3ForCausalLM, or"),
        ("GraniteForCausalLM", "use Qwen3ForCausalLM or Qwen2ForCausalLM or"),
        ("PhiForCausalLM", "use Qwen3ForCausalLM or Qwen2ForCausalLM or"),
    ],
)
def test_a_near_name_is_offered_only_where_one_is_near(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        check_architecture(Path("m"), {**OLMO, "architectures": [name]})


@pytest.mark.parametrize("model_type", ["llama", None, "qwen2", 3])
def test_a_class_and_a_model_type_that_name_two_models_are_refused(model_type: Any) -> None:
    config = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": model_type}
    with pytest.raises(ConfigError, match="by which transformers would make another model"):
        check_architecture(Path("m"), config, allow_untested=True)


def test_the_text_part_of_a_multimodal_model_is_a_model_of_its_own() -> None:
    text = {"model_type": "gemma4_text", "hidden_size": 8}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
             "tie_word_embeddings": True, "vision_config": {}, "text_config": text}  # fmt: skip
    assert text_part(outer) == {
        **text, "architectures": ["Gemma4ForCausalLM"], "tie_word_embeddings": True
    }  # fmt: skip
    assert text_part({"architectures": ["Qwen3ForCausalLM"]}) is None


def test_embeddings_of_each_layer_with_fewer_rows_than_tokens_are_refused() -> None:
    config = families.config_of("gemma4-e", vocab_size_per_layer_input=100).to_dict()
    with pytest.raises(ConfigError, match=r"vocab_size_per_layer_input is 100, fewer than .*320"):
        expected_shapes({**config, "architectures": ["Gemma4ForCausalLM"]}, tied=True)


@pytest.mark.parametrize("family", ["qwen2.5-window", "llama3", "gemma3", "gemma4-e"])
def test_garbage_in_a_config_is_an_error_of_ours(family: str) -> None:
    good = {**families.config_of(family).to_dict(), "architectures": [families.FAMILIES[family][1]]}
    garbage = (
        None,
        "x",
        -1,
        0,
        [],
        {},
        [None],
        {"a": 1},
        1e400,
        True,
        ["x"] * 4,
        {"1": 3},
        {"rope_type": {}},
        1 << 40,
    )
    refused = 0
    for key in [*good, "global_head_dim", "num_global_key_value_heads", "rope_scaling"]:
        for value in garbage:
            config = {**good, key: value}
            try:
                check_architecture(Path("m"), config, allow_untested=True)
                expected_shapes(config, tied=True)
                expected_buffers(config)
                unused_tensors(config)
                head_sizes(config)
            except (ConfigError, KeyError):
                refused += 1
    assert refused > 50
