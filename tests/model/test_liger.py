"""When Liger is used, and that its kernels compute what transformers' modules do."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch

from ds_sft.errors import ConfigError
from ds_sft.model import liger

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
QWEN3 = {"model_type": "qwen3", "hidden_act": "silu"}
PROGRAM = Path(__file__).with_name("interpreted_triton.py")
needs_liger = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton")),
    reason="liger-kernel (with triton, 1 GB) is an optional extra",
)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with Liger, whose probe answers as told."""
    fake = SimpleNamespace(doubles=lambda device: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    return fake


def test_nothing_stands_in_the_way_of_a_compared_architecture_on_a_gpu(
    probe: SimpleNamespace,
) -> None:
    assert liger.obstacle(QWEN3, GPU) is None


@pytest.mark.parametrize(
    ("config", "device", "reason"),
    [
        ({**QWEN3, "model_type": "gemma2"}, GPU, "gemma2 is not among the compared"),
        ({"hidden_act": "silu"}, GPU, "None is not among"),
        ({**QWEN3, "hidden_act": "gelu"}, GPU, "gelu, not silu"),
        (QWEN3, CPU, "Triton compiles for a GPU, this is a cpu"),
    ],
)
def test_what_was_not_compared_or_has_no_gpu_is_an_obstacle(
    probe: SimpleNamespace, config: dict[str, Any], device: torch.device, reason: str
) -> None:
    assert reason in (liger.obstacle(config, device) or "")


def test_a_compiler_that_is_missing_is_found_by_the_probe(probe: SimpleNamespace) -> None:
    def fails(device: torch.device) -> bool:
        raise RuntimeError("Python.h: No such file\nand a long log")

    probe.doubles = fails
    assert liger.obstacle(QWEN3, GPU) == (
        "Triton cannot compile here (Python.h: No such file): install a C compiler and python3-dev"
    )


def test_a_kernel_that_computes_wrong_numbers_is_an_obstacle(probe: SimpleNamespace) -> None:
    probe.doubles = lambda device: False
    assert "wrong numbers" in (liger.obstacle(QWEN3, GPU) or "")


def test_without_the_package_the_obstacle_names_it(
    probe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install liger-kernel" in (liger.obstacle(QWEN3, GPU) or "")


def test_one_rank_that_cannot_decides_for_all() -> None:
    assert liger.choose("auto", [None, None]) == (True, "auto: Triton compiles on 2 ranks")
    assert liger.choose("auto", [None, "no compiler"]) == (False, "auto: rank 1: no compiler")
    assert liger.choose("off", [None, None]) == (False, "asked for")
    with pytest.raises(ConfigError, match="--liger on: rank 1: no compiler; or use --liger auto"):
        liger.choose("on", [None, "no compiler"])


@needs_liger
@pytest.mark.slow
@pytest.mark.parametrize("model_type", liger.ARCHITECTURES)
def test_a_patched_model_is_the_plain_one_in_training_and_evaluation(model_type: str) -> None:
    """Loss, hidden states and every gradient; the norm weights are not ones."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), model_type], env=harness.cpu_env(TRITON_INTERPRET="1"),
        cwd=harness.ROOT, text=True, check=False, capture_output=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["float32"] <= 1e-5
    assert said["float32 tiled"] <= 1e-5
    assert said["float16"] <= 5e-3
    assert said["float16 to float32"] <= 1.5 * said["plain float16 to float32"]
    assert said["float32 with another epsilon"] > 1e-4
    # Evaluation, forward and recomputation of two layers; three tiles, which nothing recomputes.
    names = ("_rms_norm_backward_kernel", "_triton_rope", "_swiglu_forward_kernel")
    assert [said["launches"][n] for n in names] == [
        1 + 2 * (4 if model_type == "qwen3" else 2),
        8,
        6,
    ]
    assert said["launches tiled"]["_swiglu_forward_kernel"] == 3 * 6


@needs_liger
@pytest.mark.slow
def test_the_head_is_ligers_fused_cross_entropy_with_masked_tokens_and_a_factor_afterwards() -> (
    None
):
    """Both are held to logits in float64; a fused loss may forget a factor that comes later."""
    program = PROGRAM.with_name("interpreted_cross_entropy.py")
    done = subprocess.run(
        [sys.executable, str(program)], env=harness.cpu_env(TRITON_INTERPRET="1"),
        cwd=harness.ROOT, text=True, check=False, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("launches") > 0
    apart = {name: value for name, value in said.items() if not name.startswith("nothing")}
    assert len(apart) == 6
    assert max(apart.values()) <= 1e-6, said
    assert all(value == 0.0 for name, value in said.items() if name.startswith("nothing"))
