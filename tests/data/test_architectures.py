import math
from typing import Any

import pytest

from ds_sft.data.architectures import expected_shapes

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


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
