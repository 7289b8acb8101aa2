"""On a GPU: `fit --probe` measures what `fit` predicts, and masters in bfloat16 train.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import json
from pathlib import Path

import harness
import pytest

from ds_sft import cli

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 65536,
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072,
    "tie_word_embeddings": True, "max_position_embeddings": 8192, "initializer_range": 0.02,
    "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", ["zero3", "zero3_offload_optimizer"])
def test_the_predicted_peak_is_the_measured_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(harness.ROOT))
    words = ["fit", "--model-id", tmp_path, "--max-seq-len", 8192, "--train-batch-size", 2,
             "--configs", harness.ROOT / f"ds_configs/{name}.json", "--probe", 3,
             "--json"]  # fmt: skip
    cli.main([str(word) for word in words])
    (probed,) = json.loads(capsys.readouterr().out)["probed"]
    assert probed["problem"] == ""
    assert probed["memory"] == "allocated on the GPU"
    print(probed)
    assert probed["measured"]["peak"] == pytest.approx(probed["predicted"]["peak"], rel=0.1)


@pytest.mark.parametrize("config", ["zero3", "zero3_offload_optimizer"])
def test_masters_and_moments_in_bfloat16_train(
    config: str, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    changes = {
        "--compute-dtype": "bfloat16", "--master-dtype": "bfloat16", "--attn-impl": "sdpa",
        "--optimizer-state-dtype": "bfloat16",
        "--deepspeed-config": harness.ROOT / f"ds_configs/{config}.json",
    }  # fmt: skip
    words = harness.flags(tiny_model, tiny_data, tmp_path / "run", changes)
    done = harness.launch(1, *words, timeout=400, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stdout[-4000:]
    golden = harness.golden_trajectory("untied")
    losses = [row["loss"] for row in harness.metrics(tmp_path / "run")]
    assert max(abs(a - b["loss"]) for a, b in zip(losses, golden, strict=True)) < 0.1
