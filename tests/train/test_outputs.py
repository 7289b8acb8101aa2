"""What a run leaves behind and says: run.json, metrics.jsonl, console words, W&B."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import harness
import pytest
from harness import Result, Training, launch_many

from ds_sft.flags import parse_train

WORDS = ("--temp-checkpoint-minutes", 10, "--log-every", 5)


@pytest.fixture(scope="module")
def launched(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path, list[object]]:
    """One training as a person starts it; what it said, its directory, its words."""
    out = tmp_path_factory.mktemp("outputs") / "my-run"
    words = [*harness.flags(tiny_model, tiny_data, out), *WORDS]
    done = harness.launch(2, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    return done, out, words


@pytest.mark.slow
def test_run_json_holds_what_is_needed_to_run_again(launched: tuple) -> None:
    _, out, words = launched
    record = json.loads((out / "run.json").read_text())
    run, recipe = parse_train([str(word) for word in words])
    assert record["recipe"] == {f: getattr(recipe, f) for f in recipe.__slots__}
    assert record["run"]["log_every"] == 5
    assert record["run"]["out"] == str(out) == str(run.out)
    config = record["deepspeed_config"]
    assert config["gradient_clipping"] == 1.0
    assert config["zero_optimization"]["stage"] == 3
    assert record["versions"]["torch"] == version("torch")
    assert record["versions"]["deepspeed"] == version("deepspeed")
    assert record["world_size"] == 2
    assert record["first_step"] == 0
    words_of_ranks = [word for word in record["command"] if not word.startswith("--local_rank")]
    assert words_of_ranks[2:] == [str(word) for word in words]
    assert re.fullmatch(r"[0-9a-f]{64}", record["data"]["manifest_sha256"])
    made_from = record["made_from"]
    assert made_from["data"]["files_sha256"]["tokens.npy"]
    assert made_from["base_checkpoint"]["how"] == "sha256 of every file"
    assert {"model.safetensors", "config.json"} <= made_from["base_checkpoint"][
        "files_sha256"
    ].keys()
    assert re.fullmatch(r"[0-9a-f]{64}", made_from["tokenizer"]["chat_template_sha256"])
    assert record["git_commit"] is None or re.fullmatch(r"[0-9a-f]{40}", record["git_commit"])


@pytest.mark.slow
def test_metrics_has_the_fields_of_the_contract_one_row_a_step(launched: tuple) -> None:
    rows = harness.metrics(launched[1])
    assert [row["label"] for row in rows] == list(range(12))
    fields = {
        "label", "loss", "lr", "grad_norm", "target_tokens", "tokens", "step_time_s",
        "tokens_per_s", "tokens_per_s_per_rank", "peak_memory_gb",
    }  # fmt: skip
    for row in rows:
        assert row.keys() == fields
        assert 0 < row["target_tokens"] < row["tokens"] <= 8 * 64
        # Both are rounded: the time to 0.1 ms, the rate to 0.1 tokens/s.
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_time_s"], rel=0.01)
        assert row["tokens_per_s_per_rank"] == pytest.approx(row["tokens_per_s"] / 2, abs=0.11)


@pytest.mark.slow
def test_the_console_keeps_the_words_that_log_readers_know(launched: tuple) -> None:
    said, out = launched[0].stdout, launched[1]
    lines = said.splitlines()
    for words in (
        "First batch loaded, starting first train step",
        f"[export] wrote {out}/hf/step-11",
    ):
        assert lines.count(words) == 1, words
    done = re.compile(r"\[done\] 12 steps in 0:0\d:\d\d")
    assert len([line for line in lines if done.fullmatch(line)]) == 1
    progress = [line for line in lines if line.startswith("Progress on:train ")]
    form = re.compile(
        r"Progress on:train (\d+)it/0\.01kit rate:\d+\.\ds/it remaining:\d+:\d\d:\d\d "
        r"elapsed:\d+:\d\d:\d\d postfix:loss=\d\.\d{3}"
    )
    matches = [form.fullmatch(line) for line in progress]
    assert all(matches), progress
    assert [match[1] for match in matches if match] == ["5", "10", "12"]  # the last one always


@pytest.mark.slow
def test_the_run_directory_holds_what_the_contract_names_and_nothing_else(launched: tuple) -> None:
    out = launched[1]
    names = {path.name for path in out.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "checkpoints", "hf", "finished"}
    finished = json.loads((out / "finished").read_text())
    assert finished["completed"] == 12
    assert finished["loss"] == harness.metrics(out)[-1]["loss"]


@pytest.fixture(scope="module")
def wandb_runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Result, list[dict]]]:
    """Trainings of four steps beside a fake W&B; each with the calls that it received."""
    work = tmp_path_factory.mktemp("wandb")
    short = {"--num-train-steps": 4, "--wandb-project": "sft", "--skip-checks": True}
    wanted = {
        "half": ("twice", {**short, "--stop-after": 2, "--log-every": 3}, ""),
        "rest": ("twice", short, ""),
        "log breaks": ("log", short, "log"),
        "init breaks": ("init", {**short, "--wandb-id": "mine"}, "init"),
    }
    trainings = [
        Training(
            harness.flags(tiny_model, tiny_data, work / out, flags),
            {"FAKE_WANDB_LOG": str(work / f"{name}.jsonl"), "FAKE_WANDB_BREAKS": breaks},
        )
        for name, (out, flags, breaks) in wanted.items()
    ]
    path = f"{harness.ROOT}:{Path(__file__).with_name('fakes')}"
    results = launch_many(2, trainings, work, PYTHONPATH=path)
    return {
        name: (result, [json.loads(s) for s in (work / f"{name}.jsonl").read_text().splitlines()])
        for name, result in zip(wanted, results, strict=True)
    }


@pytest.mark.slow
def test_one_wandb_run_goes_on_over_a_restart_and_only_rank_0_talks_to_it(
    wandb_runs: dict[str, tuple[Result, list[dict]]],
) -> None:
    inits = []
    for part, labels in (("half", [0, 1]), ("rest", [2, 3])):
        result, calls = wandb_runs[part]
        assert result.codes == [0, 0], result.text[-3000:]
        assert {call["rank"] for call in calls} == {"0"}
        [start] = [call["arguments"] for call in calls if call["call"] == "init"]
        inits.append(start)
        assert (start["project"], start["name"], start["resume"]) == ("sft", "twice", "allow")
        logged = [call["values"] for call in calls if call["call"] == "log"]
        assert [values["label"] for values in logged] == labels
        rows = {row["label"]: row for row in wandb_runs["rest"][0].rows}
        for values in logged:
            row = rows[values["label"]]
            assert values["train/loss"] == row["loss"]
            assert values["train/lr"] == row["lr"]
            assert values["train/grad_norm"] == row["grad_norm"]
            assert values["train/tokens"] == row["target_tokens"]
            assert values["train/step_time"] == row["step_time_s"]
        own_step = [c for c in calls if c["call"] == "define_metric" and c["name"] == "train/*"]
        assert [c["step_metric"] for c in own_step] == ["label"]
        assert [c["allow_val_change"] for c in calls if c["call"] == "config"] == [True]
        assert calls[-1]["call"] == "finish"
    assert inits[0]["id"] == inits[1]["id"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log breaks", "init breaks"])
def test_a_logger_that_raises_never_stops_the_training(
    wandb_runs: dict[str, tuple[Result, list[dict]]], name: str
) -> None:
    result, calls = wandb_runs[name]
    assert result.codes == [0, 0], result.text[-3000:]
    assert "[wandb] ConnectionError: no route to the server" in result.text
    assert [row["label"] for row in result.rows] == [0, 1, 2, 3]
    assert (result.out / "finished").is_file()
    if name == "init breaks":
        assert calls[0]["arguments"]["id"] == "mine"


@pytest.mark.slow
def test_the_last_step_before_a_stop_is_printed_too(
    wandb_runs: dict[str, tuple[Result, list[dict]]],
) -> None:
    assert "Progress on:train 2it/" in wandb_runs["half"][0].text
