"""One rank that loads, trains and exports a tiny model of every class; see test_family_exports.py.

Writes a row of what was found for each case to the file --out; the test looks at it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
import families
import harness
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from ds_sft.data.model_files import read_model
from ds_sft.engine.build import distributed
from ds_sft.model import attention
from ds_sft.model.layers import LayerChoices
from ds_sft.model.load import build_partitioned
from ds_sft.model.sft import DeviceBatch
from ds_sft.run.export import export_live
from ds_sft.run.hf_format import ExportSource
from ds_sft.run.verify import verify

CPU = torch.device("cpu")
LEARNING_RATE = 0.001
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
IDS = torch.arange(2, 2 + 17)
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip


def wrapped(family: str, to: Path) -> Any:
    """A multimodal model with the text part of `family`, saved, and its logits."""
    name = families.FAMILIES[family][1].removesuffix("ForCausalLM")
    vision = {"vision_config": VISION} if name == "Gemma3" else {"vision_config": None}
    config = getattr(transformers, f"{name}Config")(
        text_config=families.config_of(family, **uncapped(family)).to_dict(), **vision
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    text = families.make(family).state_dict()
    model.model.language_model.load_state_dict(
        {n.removeprefix("model."): t for n, t in text.items() if n.startswith("model.")}
    )
    model.save_pretrained(to)
    return model


def uncapped(family: str) -> dict[str, Any]:
    """Gemma 3 has no soft cap; its multimodal class in transformers would leave one out."""
    return {"final_logit_softcapping": None} if family == "gemma3" else {}


def as_published(directory: Path) -> None:
    """Give Gemma 4's layers with shared keys and values the projections that files hold of them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    shared = [n for n in tensors if ".3.self_attn.q_proj" in n]
    for name in shared:
        for unused in ("k_proj", "v_proj"):
            tensors[name.replace("q_proj", unused)] = torch.zeros(3, 5)
    save_file(tensors, path, metadata={"format": "pt"})


def batch() -> DeviceBatch:
    count = len(IDS)
    return DeviceBatch(
        input_ids=IDS[None], position_ids=torch.arange(count)[None],
        positions=torch.arange(count - 1), labels=IDS[1:],
        cu_seq_lens=torch.tensor([0, count], dtype=torch.int32), segment_lengths=[count],
        max_length=count,
    )  # fmt: skip


def stepped(plain: Any) -> tuple[float, torch.Tensor, float]:
    """Loss of the plain model, its logits after a step of gradient descent, and how they moved."""
    for module in plain.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    logits = plain(IDS[None], use_cache=False).logits[0]
    loss = F.cross_entropy(logits[:-1], IDS[1:], reduction="sum")
    loss.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:  # a wrapper's other parts have none
                parameter -= LEARNING_RATE * parameter.grad
        after = plain(IDS[None], use_cache=False).logits[0]
    return loss.item(), after, (after - logits).abs().max().item()


def examine(name: str, plain: Any, directory: Path, out: Path) -> dict[str, Any]:
    """Load `directory` under ZeRO-3, train one step, export, and compare with the plain model."""
    want, logits, moved = stepped(plain)
    source = read_model(directory)
    model = build_partitioned(source, DS_CONFIG, torch.float32, 7, LayerChoices(), CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DS_CONFIG)
    loss = engine(batch())
    engine.backward(loss)
    engine.step()
    export_live(
        engine, out, dtype="float32", barrier=lambda: None,
        source=ExportSource(
            config=source.config, tokenizer_dir=harness.GOLDEN / "tiny_tokenizer",
            generation_config=None,
        ),
    )  # fmt: skip
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    with torch.no_grad():
        again = loaded(IDS[None], use_cache=False).logits[0]
    return {
        "case": name,
        "class": type(loaded).__name__,
        "loss_error": abs(loss.item() - want) / want,
        "logits_error": (again - logits).abs().max().item(),
        "moved": moved,
        "problems": {k: sorted(map(str, v)) for k, v in report.items() if v},
        "tied": loaded.config.tie_word_embeddings,
        "head_in_file": "lm_head.weight" in load_file(out / "model.safetensors"),
        "verified": len(verify(out)),
        "notes": list(source.notes),
    }


def main(words: list[str]) -> None:
    out = Path(words[words.index("--out") + 1])
    attention.register("sdpa")
    rows = []
    with distributed(5):
        for family in ("qwen2.5", "llama3", "gemma3", "gemma4-e", "gemma4-unified"):
            for tied in (False, True):
                name = f"{family}, {'tied' if tied else 'untied'}"
                directory = out.parent / name
                plain = families.make(family, tied)
                plain.save_pretrained(directory)
                if family == "gemma4-e":
                    as_published(directory)
                rows.append(examine(name, plain, directory, out.parent / f"{name} export"))
        for family in ("gemma3", "gemma4-e", "gemma4-unified"):
            directory = out.parent / f"{family} wrapped"
            plain = wrapped(family, directory)
            rows.append(
                examine(f"{family}, wrapped", plain, directory, out.parent / f"{family} text")
            )
    out.write_text(json.dumps(rows))
