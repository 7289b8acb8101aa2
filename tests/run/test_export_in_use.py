"""An export where it is used: lm-evaluation-harness on a local task, and the next training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch

pytestmark = pytest.mark.slow
QUESTIONS = [("the sky is", ["blue", "seven"], 0), ("one and one is", ["two", "green"], 0),
             ("grass is", ["nine", "green"], 1), ("a dog can", ["bark", "three"], 0)]  # fmt: skip
TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def export(tiny_model, tiny_data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    changes = {"--num-train-steps": 2, "--hf-export-dtype": "float32"}
    words = harness.flags(tiny_model, tiny_data, run, changes)
    done = harness.run_once(1, *words, work=run.parent)
    assert done.codes == [0], done.text[-3000:]
    return run / "hf/step-1"


def accuracy_by_hand(export: Path) -> float:
    """The likelier choice, summed over its tokens, with plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    hits = 0
    for question, choices, answer in QUESTIONS:
        start = len(tokenizer(question, add_special_tokens=False)["input_ids"])
        scores = []
        for choice in choices:
            text = f"{question} {choice}"
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            scores.append(logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum().item())
        hits += scores.index(max(scores)) == answer
    return hits / len(QUESTIONS)


def test_lm_eval_scores_an_export_as_plain_transformers_does(export, tmp_path):
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(data=data))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf",
        "--model_args", f"pretrained={export},dtype=float32", "--tasks", "local_choice",
        "--include_path", tmp_path, "--device", "cpu", "--batch_size", "1",
        "--output_path", tmp_path / "results",
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(list(map(str, command)), env=env, text=True, capture_output=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "results").rglob("results_*.json")
    scored = json.loads(result.read_text())["results"]["local_choice"]["acc,none"]
    assert scored == accuracy_by_hand(export)


def test_training_starts_again_from_an_export_with_the_same_data(export, tiny_data, tmp_path):
    """The export's tokenizer is padded to the model's vocabulary; it is still the data's."""
    run = tmp_path / "run"
    changes = {"--num-train-steps": 1, "--warmup": 0, "--hf-export-dtype": "float32"}
    words = harness.flags(export, tiny_data, run, changes)
    done = harness.run_once(1, *words, work=tmp_path)
    assert done.codes == [0], done.text[-3000:]
    before, after = harness.weights(export), harness.weights(run / "hf/step-0")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    names = ("tokenizer.json", "chat_template.jinja")
    assert all((run / "hf/step-0" / n).read_bytes() == (export / n).read_bytes() for n in names)
