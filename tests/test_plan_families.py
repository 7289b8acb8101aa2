"""What a plan says and refuses about models of other families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import harness
import pytest
import transformers

from ds_sft import plan as planning
from ds_sft import plan_memory
from ds_sft.errors import ConfigError
from ds_sft.flags import parse_train
from ds_sft.plan import Plan
from ds_sft.plan_facts import facts


def planned(model: Path, data: Path, **changes: Any) -> Plan:
    words = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    flags = harness.flags(model, data, model.parent / "run", words)
    run, recipe = parse_train([str(word) for word in flags])
    return planning.check(run, recipe, world_size=2)


@pytest.mark.parametrize("family", ["qwen2.5", "gemma3", "gemma4-e", "gemma4-unified"])
def test_a_plan_knows_every_family(family: str, tiny_data: Path, tmp_path: Path) -> None:
    model = families.save(family, tmp_path / "model")
    plan = planned(model, tiny_data)
    said = facts(plan)["model"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert said["parameters"] == sum(p.numel() for p in plain.parameters())
    assert said["architecture"] == type(plain).__name__
    assert said["tied"] is (family in families.TIED)
    assert not any("embed" in name for name in said["decayed"]["sample"])
    need = plan_memory.facts(plan)
    assert need["gpu"]["total"] > 0


@pytest.mark.parametrize("asked", ["flash_attention_2", "varlen"])
def test_a_kernel_that_cannot_take_a_layers_heads_is_refused_by_the_plan(
    asked: str, tiny_data: Path, tmp_path: Path
) -> None:
    model = families.save("gemma4", tmp_path / "model", global_head_dim=264)
    with pytest.raises(ConfigError, match=f"--attn-impl {asked} takes heads of up to 256.* 264"):
        planned(model, tiny_data, attn_impl=asked)
    assert any("heads of 264 run on sdpa" in note for note in planned(model, tiny_data).notes)
    notes = planned(model, tiny_data, attn_impl="sdpa").notes
    assert not any("264" in note for note in notes)


def test_an_untested_architecture_needs_a_flag_and_is_noted(
    tiny_data: Path, tmp_path: Path
) -> None:
    model = families.save("llama3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"MistralForCausalLM is not tested.*--allow-untested"):
        planned(model, tiny_data)
    plan = planned(model, tiny_data, allow_untested_architecture=True)
    assert any("MistralForCausalLM was never tested here" in note for note in plan.notes)


def test_the_text_part_of_a_multimodal_model_is_planned_and_noted(
    tiny_data: Path, tmp_path: Path
) -> None:
    model = families.save("gemma4", tmp_path / "model")
    text = json.loads((model / "config.json").read_text())
    wrapper = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "text_config": text, "vision_config": {"hidden_size": 4},
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(wrapper))
    plan = planned(model, tiny_data)
    assert any("only its text part is trained and exported" in note for note in plan.notes)
    assert plan.model is not None
    assert plan.model.config["architectures"] == ["Gemma4ForCausalLM"]
