"""Wrong input is refused before anything starts: one line, exit code 2, from both commands."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from ds_sft import cli, train
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.flags import parse_train
from ds_sft.plan import check

Words = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A directory with a good model, a good data set and no run, that a case may spoil."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def out(self) -> Path:
        return self.root / "run"

    def write(self, name: str, content: Any) -> Path:
        """A file with text, or with an object as JSON, or with an array."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            np.save(path, content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def link(self, name: str) -> dict[str, Any]:
        """A link that leads nowhere."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("nothing")
        return {}

    def deepspeed(self, content: Any) -> Words:
        return {"--deepspeed-config": self.write("my.json", content)}

    def edit_config(self, **changes: Any) -> Words:
        config = json.loads((self.model / "config.json").read_text())
        self.write("model/config.json", {**config, **changes})
        return {}

    def pack(self, rows: list[list[int]], masks: list[list[int]], length: int = 8) -> Words:
        """Another data set, with the good one's tokenizer."""
        with PackedWriter(self.root / "other", max_seq_len=length) as writer:
            for row, mask in zip(rows, masks, strict=True):
                writer.add_pack(np.array(row), np.array(mask), [len(row)])
            shutil.copytree(self.data / "tokenizer", writer.tokenizer_dir)
            writer.commit({})
        return {"--data": self.root / "other"}

    def checkpoint(self, **changes: Any) -> Path:
        """A native checkpoint of the good run, as far as its meta.json goes."""
        import dataclasses

        words = [str(word) for word in harness.flags(self.model, self.data, self.out)]
        plan = check(*parse_train(words), world_size=2)
        assert plan.model is not None
        meta = {
            "format": 1, "label": 4, "completed": 5, "world_size": 2, "compute_dtype": "float32",
            "recipe": dataclasses.asdict(plan.recipe),
            "data_manifest_sha256": plan.data.manifest_sha256,
            "model": {"config.json": plan.model.config}, **changes,
        }  # fmt: skip
        return self.write("run/checkpoints/step-4/meta.json", meta).parent


def truncate(path: Path, size: int) -> Words:
    path.write_bytes(path.read_bytes()[:size])
    return {}


def rename(path: Path, name: str) -> Words:
    path.rename(path.with_name(name))
    return {}


def other_tokenizer(place: Place) -> Words:
    path = place.model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["content"] = "<|another|>"
    path.write_text(json.dumps(content))
    return {}


def no_packs(place: Place) -> Words:
    with PackedWriter(place.root / "other", max_seq_len=8) as writer:
        writer.commit({})
    return {"--data": place.root / "other"}


def resume_from_nothing(place: Place) -> Words:
    (place.root / "step-3").mkdir()
    return {"--resume": place.root / "step-3"}


def run_that_exists(place: Place) -> Words:
    place.checkpoint()
    return {"--resume": "none"}


def config_of_another_model(place: Place) -> Path:
    return place.checkpoint(model={"config.json": {"model_type": "qwen3", "vocab_size": 999}})


# name: (what is spoilt; returns flags laid over the good ones, words to be said)
Case = tuple[Callable[[Place], Words], str]
ZERO = "zero_optimization"
CASES: dict[str, Case] = {
    # arguments
    "unknown flag": (lambda p: {"--learning-rat": 1}, "--learning-rat"),
    "no data": (lambda p: {"--data": None}, "--data"),
    "text for a number": (lambda p: {"--train-batch-size": "eight"}, "eight"),
    "replaced flag": (lambda p: {"--init-mode": "meta"}, "--init-mode is a flag of the FSDP"),
    "unknown kernel": (lambda p: {"--attn-impl": "eager"}, "eager"),
    "unknown export dtype": (lambda p: {"--hf-export-dtype": "int8"}, "int8"),
    "epochs and steps": (lambda p: {"--epochs": 2}, "exclude each other"),
    "whole row of logits": (lambda p: {"--loss-chunk-size": 0}, "add --allow-full-logits"),
    "no packs in a row": (lambda p: {"--per-device-batch": 0}, "per-device-batch=0 must be"),
    "log every 0": (lambda p: {"--log-every": 0}, "log-every=0 must be"),
    "out is a file": (lambda p: {"--out": p.write("run.txt", "")}, "is no directory"),
    # the recipe
    "unknown recipe": (lambda p: {"--recipe": "qwen4"}, "did you mean qwen3-4b? Known are"),
    "no recipe file": (lambda p: {"--recipe": p.root / "x.toml"}, "x.toml does not exist"),
    "recipe file is not TOML": (
        lambda p: {"--recipe": p.write("x.toml", "a = = 1")}, "x.toml cannot be read"),
    "unknown key in a recipe": (
        lambda p: {"--recipe": p.write("x.toml", 'base = "qwen3-8b"\nwarmups = 1')},
        "did you mean `warmup`?"),
    "cycles in a recipe": (
        lambda p: {"--recipe": p.write("x.toml", 'base = "qwen3-8b"\ncycles = 2')},
        "`cycles` is not supported"),
    "groups do not divide the batch": (
        lambda p: {"--train-batch-size": 9}, "train_batch_size=9 cannot be split into 2"),
    "negative learning rate": (lambda p: {"--learning-rate": -1}, "learning_rate=-1.0 is out of"),
    "warmup of one and a half": (lambda p: {"--warmup": 1.5}, "warmup=1.5 is neither"),
    "no checkpoints": (lambda p: {"--steps-per-checkpoint": 0}, "steps_per_checkpoint=0"),
    "no exports": (lambda p: {"--steps-per-hf-export": -5}, "steps_per_hf_export=-5"),
    "unknown schedule": (lambda p: {"--lr-schedule": "poly"}, "lr_schedule='poly' is not known"),
    "reduction below compute": (
        lambda p: {"--grad-reduce-dtype": "bfloat16"}, "use --grad-reduce-dtype float32"),
    "unknown order": (lambda p: {"--order": "random"}, "--order 'random' is not known"),
    "no order file": (lambda p: {"--order": p.root / "o.npy"}, "o.npy does not exist"),
    "order of another data set": (
        lambda p: {"--order": p.write("o.npy", np.array([0, 28]))}, "names packs 0 to 28"),
    # ranks
    "too many idle slots": (lambda p: {"world": 3}, "33% of the slots would idle"),
    "endless epochs": (lambda p: {"--epochs": "inf", "--num-train-steps": None}, "--epochs=inf"),
    "endless rate": (lambda p: {"--learning-rate": "inf"}, "learning_rate=inf"),
    "endless run": (lambda p: {"--num-train-steps": 10**11}, "num_train_steps=100000000000"),
    "endless batch": (lambda p: {"--train-batch-size": 10**15}, "batch_size=1000000000000000"),
    "negative seed": (lambda p: {"--trainer-seed": -1}, "trainer_seed=-1"),
    "endless timeout": (lambda p: {"--collective-timeout-minutes": "inf"}, "timeout-minutes=inf"),
    "run inside the data": (lambda p: {"--out": p.data / "run"}, "lies in --data"),
    "nonsense that may change": (lambda p: {"--allow-change": "nonsense"}, "nonsense is no field"),
    "no ranks": (lambda p: {"world": 0}, "--world-size 0"),
    # the DeepSpeed file
    "no JSON file": (lambda p: {"--deepspeed-config": p.root / "x.json"}, "x.json does not exist"),
    "JSON with a comma too many": (lambda p: p.deepspeed('{"a": 1,}'), "my.json:1:9: not JSON"),
    "JSON list": (lambda p: p.deepspeed([1]), "not a JSON object"),
    "unknown JSON key, level 1": (
        lambda p: p.deepspeed({"gradient_cliping": 1.0}), "did you mean `gradient_clipping`?"),
    "unknown JSON key, level 2": (
        lambda p: p.deepspeed({ZERO: {"overlap": True}}), f"unknown key `{ZERO}.overlap`"),
    "unknown JSON key, level 3": (
        lambda p: p.deepspeed({ZERO: {"offload_param": {"pin_memry": True}}}),
        f"did you mean `{ZERO}.offload_param.pin_memory`?"),
    "JSON key of the recipe": (
        lambda p: p.deepspeed({"gradient_clipping": 1.0}), "use --max-grad-norm"),
    "JSON key that changes the numbers": (
        lambda p: p.deepspeed({ZERO: {"zero_quantized_gradients": True}}), "Levanter's"),
    "auto": (lambda p: p.deepspeed({ZERO: {"reduce_bucket_size": "auto"}}), '"auto"'),
    "ZeRO stage 2": (lambda p: p.deepspeed({ZERO: {"stage": 2}}), "built on stage 3"),
    "text in a JSON number": (
        lambda p: p.deepspeed({ZERO: {"sub_group_size": "1e9"}}), "must be a whole number"),
    "NVMe without a path": (
        lambda p: p.deepspeed({ZERO: {"offload_optimizer": {"device": "nvme"}}}),
        "nvme_path` is missing"),
    "NVMe path that is not there": (
        lambda p: p.deepspeed({ZERO: {"offload_optimizer": {"device": "nvme"}}})
        | {"--nvme-path": p.root / "none"}, "none is not a directory"),
    "NVMe path for nothing": (lambda p: {"--nvme-path": p.root}, "puts nothing on NVMe"),
    # the data
    "no data directory": (lambda p: {"--data": p.root / "none"}, "none is not a directory"),
    "data without manifest": (
        lambda p: rename(p.data / "manifest.json", "m.json"), "has no manifest.json"),
    "manifest cut short": (lambda p: truncate(p.data / "manifest.json", 9), "cannot be read"),
    "tokens missing": (lambda p: rename(p.data / "tokens.npy", "t.npy"), "tokens.npy is missing"),
    "tokens cut short": (lambda p: truncate(p.data / "tokens.npy", 999), "tokens.npy cannot be"),
    "data of another version": (
        lambda p: {"x": p.write("data/manifest.json", {"format_version": 9, "max_seq_len": 64})},
        "data format 9"),
    "data without packs": (no_packs, "holds no pack"),
    "group without targets": (
        lambda p: {"--num-train-steps": 1, **p.pack([[1, 2]] * 8, [[0, 1]] * 4 + [[0, 0]] * 4)},
        "loss group 1 of step 0"),
    "token beyond the vocabulary": (
        lambda p: p.pack([[1, 2, 512]] * 8, [[0, 1, 1]] * 8), "token id 512"),
    "rows longer than the model": (
        lambda p: p.pack([[1, 2]] * 8, [[0, 1]] * 8, length=128), "max_position_embeddings"),
    "tokenizer of another model": (other_tokenizer, "prepared with another tokenizer"),
    "tokenizer without template": (
        lambda p: rename(p.data / "tokenizer" / "chat_template.jinja", "x"), "no chat template"),
    "tokenizer that is not here": (lambda p: {"--tokenizer": "org/name"}, "nor in the Hub's cache"),
    "no generation config to keep": (
        lambda p: {"--keep-generation-config": True}, "has no generation_config.json"),
    "no such tokenizer": (lambda p: {"--tokenizer": p.root / "t"}, "does not exist"),
    # the model
    "no such model": (lambda p: {"--model-id": p.root / "m"}, "does not exist: check the path"),
    "model that is no name": (lambda p: {"--model-id": "qwen3"}, "neither a directory nor a Hub"),
    "model without config": (
        lambda p: rename(p.model / "config.json", "c.json"), "has no config.json"),
    "weights cut short": (lambda p: truncate(p.model / "model.safetensors", 5000), "safetensors"),
    "pickled weights": (
        lambda p: rename(p.model / "model.safetensors", "pytorch_model.bin"), "convert it"),
    "untested architecture": (
        lambda p: p.edit_config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not"),
    "mixture of experts": (
        lambda p: p.edit_config(architectures=["Qwen3MoeForCausalLM"]), "mixture of experts"),
    "weights of another config": (
        lambda p: p.edit_config(num_hidden_layers=5, layer_types=None), "missing model.layers.2"),
    # resuming
    "no such checkpoint": (lambda p: {"--resume": p.root / "step-9"}, "step-9 is not a directory"),
    "checkpoint that is not whole": (resume_from_nothing, "step-3 has no meta.json"),
    "checkpoint of another model": (
        lambda p: {"--resume": config_of_another_model(p)}, "is of another model"),
    "checkpoint of other data": (
        lambda p: {"--resume": p.checkpoint(data_manifest_sha256="0" * 64)}, "data was 0000"),
    "checkpoint of other code": (
        lambda p: {"x": p.checkpoint(fingerprint={"code": "0.0.1-abc"})}, "code was 0.0.1-abc and"),
    "checkpoint with another tokenizer": (
        lambda p: {"x": p.checkpoint(fingerprint={"tokenizer": "abc"})}, "tokenizer was abc and"),
    "another model of the same shapes": (
        lambda p: {"x": p.checkpoint(), **p.edit_config(rope_theta=77.0)}, "--allow-change model"),
    "a file for a directory": (
        lambda p: p.write("run/checkpoints", {}) and {}, "checkpoints is no directory"),
    "a directory for a file": (
        lambda p: p.write("run/finished/x", {}) and {}, "finished is no file"),
    "out that an unset variable left empty": (lambda p: {"--out": ""}, "is a variable not set?"),
    "out with a tilde": (lambda p: {"--out": "~/run"}, "no shell has replaced the ~"),
    "out with a line break": (lambda p: {"--out": p.root / "a\nb"}, "has a line break"),
    "out that is not UTF-8": (lambda p: {"--out": p.root / "r\udce4n"}, "is not UTF-8"),
    "out with too long a name": (lambda p: {"--out": p.root / ("x" * 256)}, "name too long"),
    "out that is a link to nothing": (
        lambda p: p.link("run"), "run is a link to nothing, which is not there"),
    "checkpoints on a disk that is not mounted": (
        lambda p: p.link("run/checkpoints"), "is a link to nothing, which is not there"),
    "two changes at once": (
        lambda p: {"x": p.checkpoint(fingerprint={"code": "abc"}), "--learning-rate": 0.5},
        "--allow-change code learning_rate"),
    "checkpoint of another recipe": (
        lambda p: {"x": p.checkpoint(), "--learning-rate": 0.5}, "--allow-change learning_rate"),
    "start over an existing run": (run_that_exists, "holds a run with checkpoints"),
    "change of no field": (
        lambda p: {"x": p.checkpoint(), "--allow-change": "lr"}, "--allow-change lr is no field"),
}  # fmt: skip


@pytest.fixture
def place(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Place:
    shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copytree(tiny_data, tmp_path / "data")
    return Place(tmp_path)


def spoil(place: Place, name: str) -> tuple[list[str], int]:
    """Words of the command line and the world size of a case."""
    changes = CASES[name][0](place)
    world = changes.pop("world", 2)
    changes = {flag: value for flag, value in changes.items() if flag.startswith("--")}
    return [str(w) for w in harness.flags(place.model, place.data, place.out, changes)], world


def refuse_training(plan: object) -> None:
    raise AssertionError("training would have started")


@pytest.mark.parametrize("name", CASES)
def test_plan_and_train_refuse_with_the_same_line(
    name: str, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, world = spoil(place, name)
    monkeypatch.setattr(train, "train", refuse_training)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    lines = []
    for command in (["plan", *words, "--world-size", str(world)], ["train", *words]):
        started = time.process_time()
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        seconds = time.process_time() - started
        said = capsys.readouterr()
        assert ended.value.code == 2
        assert said.out == ""
        assert seconds < 1.0
        lines.append(re.sub(r" \(see \S+( plan)? --help\)", "", said.err))
    assert lines[0] == lines[1]
    assert lines[0].startswith("error: ")
    assert lines[0].count("\n") == 1
    assert CASES[name][1] in lines[0]


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 30


def test_what_is_not_spoilt_is_accepted(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(word) for word in harness.flags(place.model, place.data, place.out)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    cli.main(["plan", *words, "--world-size", "2"])
    planned = capsys.readouterr().out
    cli.main(["train", *words, "--dry-run"])
    free = re.compile(r"free at --out .*\n")  # others write to the disk meanwhile
    said, planned = (free.sub("", text) for text in (capsys.readouterr().out, planned))
    assert said.startswith(planned)
    looked = said.removeprefix(planned).splitlines()
    assert all(line.startswith("[preflight] ") for line in looked)
    assert looked[-1] == "[preflight] passed"
    assert "12 = 3.4286 epochs" in planned


SCRIPT = """
import runpy, sys
try:
    sys.argv = ["ds_sft.train", *sys.argv[1:]]
    runpy.run_module("ds_sft.train", run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("name", ["JSON key of the recipe", "checkpoint of another model"])
def test_a_real_process_refuses_without_traceback_and_before_torch(name: str, place: Place) -> None:
    words, world = spoil(place, name)
    env = {**os.environ, "WORLD_SIZE": str(world), "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], env=env, cwd=harness.ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    planned = subprocess.run(
        [sys.executable, "-m", "ds_sft", "plan", *words, "--world-size", str(world)],
        env=env, cwd=harness.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "False\n"
    assert (done.returncode, planned.returncode) == (2, 2)
    assert done.stderr == planned.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_rank_that_is_not_ended_with_rank_0_says_what_is_wrong_on_its_host(place: Place) -> None:
    """The launcher ends a host's ranks soon after rank 0's line; one that lives on is alone."""
    words, world = spoil(place, "no such model")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ds_sft.train", *words], cwd=harness.ROOT, capture_output=True,
        env={**os.environ, "WORLD_SIZE": str(world), "RANK": "1"}, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: rank 1 on host {socket.gethostname()}: --model-id")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - started > 3
