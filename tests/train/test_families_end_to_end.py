"""Tiny Llama and tiny Gemma 4 from chats over `ds-sft prepare` to an export, on two ranks."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import harness
import pytest
import torch
from harness import Result, Training, launch_many
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_sft import cli
from ds_sft.run.native import NativeCheckpoint
from ds_sft.run.verify import verify

pytestmark = pytest.mark.slow
STEPS = 5
SIZES = {"hidden_size": 128, "layers": 4, "untied": False, "seed": 0, "vocab_size": 512}
FLAGS = {
    "--num-train-steps": STEPS, "--train-batch-size": 4, "--loss-groups": 1,
    "--learning-rate": 2e-3, "--warmup": 1, "--steps-per-hf-export": 100,
    "--steps-per-checkpoint": 100, "--hf-export-dtype": "float32", "--mlp-tiles": 2,
    "--compute-dtype": "bfloat16",
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma4": {"--optimizer": "apollo", "--apollo-rank": 8},
}
families = pytest.mark.parametrize("family", OF_FAMILY)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, harness.ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Chats, tokenizer and models, the data set, and both trainings in one launch."""
    work = tmp_path_factory.mktemp("families")
    chats = work / "chats.jsonl"
    make_chats, maker = script("make_chats"), script("make_tiny_model")
    sys_argv, sys.argv = sys.argv, ["make_chats.py", "--out", str(chats), "--count", "60"]
    try:
        make_chats.main()
    finally:
        sys.argv = sys_argv
    tokenizer = maker.make_tokenizer(chats, SIZES["vocab_size"])
    for family in OF_FAMILY:
        model = maker.make_model(tokenizer, argparse.Namespace(family=family, **SIZES))
        model.save_pretrained(work / family)
        tokenizer.save_pretrained(work / family)
    cli.main(
        ["prepare", "--input", str(chats), "--tokenizer", str(work / "gemma4"), "--chat-template",
         "qwen3", "--max-seq-len", "512", "--out", str(work / "data"), "--workers", "1"]
    )  # fmt: skip
    trainings = [
        Training(harness.flags(work / f, work / "data", work / f"run-{f}", {**FLAGS, **own}))
        for f, own in OF_FAMILY.items()
    ]
    done = launch_many(2, trainings, work)
    return dict(zip(OF_FAMILY, done, strict=True))


def exported(run: Result) -> Path:
    return run.out / f"hf/step-{STEPS - 1}"


@families
def test_both_are_trained_to_the_end_and_learn(family: str, runs: dict[str, Result]) -> None:
    run = runs[family]
    assert run.codes == [0, 0], run.text[-3000:]
    losses = run.column("loss")
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(512)) < 1.0
    assert losses[-1] < losses[0] - 0.05


@families
def test_plain_transformers_computes_the_logits_of_the_masters(
    family: str, runs: dict[str, Result]
) -> None:
    directory = exported(runs[family])
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    native = NativeCheckpoint.open(runs[family].out / f"checkpoints/step-{STEPS - 1}")
    masters = {
        name: torch.cat([piece.flatten() for piece in native.pieces(name)]).view(shape)
        for name, shape in native.shapes.items()
    }
    masters |= {name: buffer.float() for name, buffer in native.buffers.items()}
    assert any("layer_scalar" in name for name in masters) is (family == "gemma4")
    want = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    missing, extra = want.load_state_dict(masters, strict=False)
    assert (missing, extra) == (["lm_head.weight"], [])
    want.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("What is the capital of Peru? Lima.", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = [m.eval()(ids, use_cache=False).logits for m in (model, want)]
    assert torch.equal(*logits)


@families
def test_the_export_is_whole_and_the_one_made_offline(
    family: str, runs: dict[str, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = runs[family], tmp_path / "again"
    assert verify(exported(run))
    cli.main(
        ["export", "--checkpoint", str(run.out / f"checkpoints/step-{STEPS - 1}"), "--out",
         str(out), "--dtype", "float32"]
    )  # fmt: skip
    assert harness.same_files(out, exported(run))
    said = capsys.readouterr().out
    assert f"[export] wrote {out}\n[numerics] " in said
    assert "0 values that are not finite" in said
    numerics = [line for line in run.text.splitlines() if line.startswith("[numerics] ")]
    assert numerics == [line for line in said.splitlines() if line.startswith("[numerics] ")]


def test_the_start_says_what_the_family_needs(runs: dict[str, Result]) -> None:
    said = {family: run.text for family, run in runs.items()}
    for text in said.values():
        assert "[init] attention sdpa (cpu and bfloat16), one segment per document" in text
        assert "[init] parameters: " in text
    assert "[init] parameters: 28 linear, 9 norm, 1 embedding" in said["llama"]
    assert "2 embedding" in said["gemma4"]
    assert "gemma4_text is not among the compared architectures" in said["gemma4"]
