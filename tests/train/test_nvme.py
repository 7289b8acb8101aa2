"""Optimizer state and parameters on NVMe: another JSON, the same curve, nothing lost on resume.

DeepSpeed swaps only tensors of 1 MiB and more, so the model here has a large vocabulary; each rank
swaps two embeddings and a sub-group of the rest, and keeps the norms in memory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import Result, Training, launch_many, weights

CONFIGS = harness.ROOT / "ds_configs"
VOCABULARY = 16384
KEPT = {"--hf-export-dtype": "float32", "--keep-checkpoints": 0}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden tiny Qwen3 with rows for tokens that no data has."""
    import torch
    from safetensors.torch import load_file, save_file

    path = harness.copy_tiny_model(tmp_path_factory.mktemp("wide") / "model")
    tensors = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = tensors[name]
        more = torch.randn(VOCABULARY - len(old), old.shape[1]) * 0.02
        tensors[name] = torch.cat([old, more])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    return path


def small(name: str, to: Path, **changes: Any) -> Path:
    """A shipped JSON with sub-groups and buffers of this model's size."""
    config = json.loads((CONFIGS / name).read_text())
    zero = config["zero_optimization"]
    zero |= {"sub_group_size": 500_000, **changes}
    if "offload_param" in zero:
        zero["offload_param"]["buffer_size"] = 600_000
    path = to / name
    path.write_text(json.dumps(config))
    return path
