"""From files to ZeRO-3, one step, an export, and back into plain transformers; every class."""

from __future__ import annotations

import json
from typing import Any

import families
import pytest
from harness import Training, launch_many

CLASSES = {name for _, name, _ in families.FAMILIES.values()} - {"Qwen3ForCausalLM"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("families") / "rows.json"
    worker = Training(["--out", out], module="family_worker")
    (done,) = launch_many(1, [worker], out.parent)
    assert done.codes == [0], done.text[-4000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_an_export_after_a_step_is_the_plain_model_after_that_step(
    rows: list[dict[str, Any]],
) -> None:
    assert {row["class"] for row in rows} == CLASSES
    for row in rows:
        assert row["loss_error"] <= 1e-6, row
        assert row["logits_error"] <= 1e-3 * row["moved"], row
        assert row["moved"] > 1e-2, row


@pytest.mark.slow
def test_transformers_finds_nothing_missing_and_nothing_too_much(
    rows: list[dict[str, Any]],
) -> None:
    assert [row["case"] for row in rows if row["problems"]] == []
    assert all(row["verified"] >= 5 for row in rows)
    for row in rows:
        assert row["tied"] is not row["head_in_file"]
        assert row["tied"] is not ("untied" in row["case"])


@pytest.mark.slow
def test_of_a_multimodal_model_the_text_part_is_trained_and_that_is_said(
    rows: list[dict[str, Any]],
) -> None:
    wrapped = [row for row in rows if "wrapped" in row["case"]]
    assert len(wrapped) == 3
    for row in rows:
        said = [note for note in row["notes"] if "only its text part is trained" in note]
        assert len(said) == (row in wrapped)
