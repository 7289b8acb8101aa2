"""Evaluations during a run: their loss is plain torch's, and the training does not notice them.

One launch for each number of ranks. The validation set has five packs, which neither two ranks nor
two packs a rank divide, or two, which three ranks cannot share.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import Result, Training, launch_many

from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter

pytestmark = pytest.mark.slow
LABELS = [3, 6, 7]
RUN = {
    "--num-train-steps": 8, "--train-batch-size": 4, "--eval-every": 3,
    "--hf-export-dtype": "float32",
    "--steps-per-hf-export": 3, "--steps-per-checkpoint": 100,
}  # fmt: skip
EXACT = ("label", "loss", "lr", "grad_norm", "target_tokens", "tokens")
LIMIT = 1e-5  # float32 sums in another order
# Every parameter is gathered, prefetched and freed; what a forward leaves behind would show.
TIGHT = {
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 20000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 40000,
        "stage3_max_reuse_distance": 0,
    }
}


def with_validation(data: Path, to: Path, packs: list[int]) -> Path:
    """The golden data with a few of its packs as its validation set."""
    shutil.copytree(data, to)
    source = PackedDataset.open(data)
    with PackedWriter(to / "validation", max_seq_len=source.max_seq_len) as writer:
        for pack in packs:
            lengths = source.doc_lengths(pack)
            used = sum(lengths)
            writer.add_pack(source.tokens[pack, :used], source.assistant_mask[pack, :used], lengths)
        shutil.copytree(data / "tokenizer", writer.tokenizer_dir)
        writer.commit({"packing": "next-fit"})
    return to


@pytest.fixture(scope="module")
def five(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_validation(tiny_data, tmp_path_factory.mktemp("five") / "data", [3, 27, 9, 14, 0])


@pytest.fixture(scope="module")
def two(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_validation(tiny_data, tmp_path_factory.mktemp("two") / "data", [5, 20])


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, five: Path, two: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:  # fmt: skip
    """Every training of this file, by name; those called `chain` go on from one another."""
    work = tmp_path_factory.mktemp("evaluation")
    tight = work / "tight.json"
    tight.write_text(json.dumps(TIGHT))

    def training(name: str, data: Path, trouble: str = "", **changes: Any) -> Training:
        words = harness.flags(
            tiny_model,
            data,
            work / name.split(":")[0],
            {**RUN, "--deepspeed-config": tight, **changes},
        )
        if not trouble:
            return Training(words)
        return Training(words, {"IN_EVALUATION": trouble}, module="troubled_evaluation")

    wanted = {
        1: {"1": training("1", five, **{"--per-device-batch": 2})},
        2: {
            "2": training("2", five),
            "none": training("none", tiny_data, **{"--eval-every": None}),
            "chain: killed": training("chain", five, "kill 3"),
            "chain: stopped": training("chain", five, "stop 3"),
            "chain: killed at the end": training("chain", five, "kill 7"),
            "chain: stopped at the end": training("chain", five, "stop 7"),
            "chain": training("chain", five),
        },
        3: {"3": training("3", two, **{"--allow-idle": True})},
    }
    results: dict[str, Result] = {}
    for world_size, group in wanted.items():
        done = launch_many(world_size, list(group.values()), work / f"launch-{world_size}")
        results |= dict(zip(group, done, strict=True))
    return results


def steps(result: Result) -> list[dict[str, Any]]:
    return [row for row in result.rows if "loss" in row]


def evaluations(result: Result) -> dict[int, dict[str, Any]]:
    """By label; a second one of the same label is a failure."""
    rows = [row for row in result.rows if "eval/loss" in row]
    assert all("loss" not in row for row in rows)
    assert len({row["label"] for row in rows}) == len(rows)
    return {row["label"]: row for row in rows}


def plain_loss(export: Path, data: PackedDataset) -> float:
    """Mean loss of a trained token: transformers on one document after the other."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for pack in range(data.num_packs):
        start = 0
        for length in data.doc_lengths(pack):
            row = torch.from_numpy(data.tokens[pack].astype("int64"))
            with torch.no_grad():
                logits = model(input_ids=row[None, start : start + length]).logits[0].double()
            for at in range(length):
                target = start + at + 1
                if target < data.max_seq_len and data.assistant_mask[pack, target]:
                    total -= float(logits[at].log_softmax(0)[row[target]])
                    count += 1
            start += length
    return total / count


@pytest.mark.parametrize(("name", "kind"), [("1", "five"), ("2", "five"), ("3", "two")])
def test_the_loss_is_plain_torchs_for_any_split_over_ranks(
    name: str, kind: str, runs: dict[str, Result], request: pytest.FixtureRequest
) -> None:
    data = PackedDataset.open(request.getfixturevalue(kind) / "validation")
    got = evaluations(runs[name])
    assert runs[name].codes == [0] * int(name)
    assert list(got) == LABELS
    for label, row in got.items():
        want = plain_loss(runs[name].out / f"hf/step-{label}", data)
        assert abs(row["eval/loss"] - want) < LIMIT
        assert row["eval/tokens"] == int(data.assistant_counts.sum())
        assert row["eval/seconds"] > 0
        assert f"[eval] step-{label} loss={row['eval/loss']:.4f} over" in runs[name].text


def test_the_training_is_bit_equal_with_and_without_evaluations(runs: dict[str, Result]) -> None:
    got, want = steps(runs["2"]), steps(runs["none"])
    assert [[row[n] for n in EXACT] for row in got] == [[row[n] for n in EXACT] for row in want]
    ours, theirs = (runs[n].out / "hf/step-7/model.safetensors" for n in ("2", "none"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert evaluations(runs["none"]) == {}


def test_an_evaluation_follows_its_step_in_the_metrics(runs: dict[str, Result]) -> None:
    kinds = [(row["label"], "loss" in row) for row in runs["2"].rows]
    assert kinds == sorted([(n, True) for n in range(8)] + [(n, False) for n in LABELS],
                           key=lambda k: (k[0], not k[1]))  # fmt: skip


def test_a_stop_is_heard_inside_an_evaluation(runs: dict[str, Result]) -> None:
    stopped = runs["chain: stopped"]
    assert stopped.codes == [75, 75]
    assert "[stop] the file `stop` appeared after 4 steps" in stopped.text


def test_a_stop_inside_the_last_evaluation_is_no_finished_run(runs: dict[str, Result]) -> None:
    stopped = runs["chain: stopped at the end"]
    assert stopped.codes == [75, 75]
    assert "[stop] the file `stop` appeared after 8 steps" in stopped.text
    assert "[done]" not in stopped.text


def test_what_was_interrupted_is_evaluated_again_and_once_in_the_end(
    runs: dict[str, Result],
) -> None:
    """Killed and stopped at label 3, killed and stopped at the last one: the rows of one run."""
    assert runs["chain: killed"].codes == runs["chain: killed at the end"].codes == [-9, -9]
    chain, straight = runs["chain"], runs["2"]
    assert chain.codes == [0, 0]
    assert (chain.out / "finished").is_file()
    got, want = evaluations(chain), evaluations(straight)
    assert list(got) == LABELS
    assert [row["eval/loss"] for row in got.values()] == [r["eval/loss"] for r in want.values()]
    assert [[row[n] for n in EXACT] for row in steps(chain)] == [
        [row[n] for n in EXACT] for row in steps(straight)
    ]
