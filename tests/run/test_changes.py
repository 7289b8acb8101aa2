"""What a resumed run may not change in silence."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import harness
import pytest

import ds_sft
from ds_sft.errors import ConfigError
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe
from ds_sft.run import changes
from ds_sft.run.resume import ResumePoint

RECIPE = RECIPES["qwen3-8b"].replace(num_train_steps=100)
NOW = {"data": "d1", "tokenizer": "t1", "code": "c1"}


def point(**meta: object) -> ResumePoint:
    record = {
        "model": {}, "world_size": 2, "data_manifest_sha256": "d1", "fingerprint": NOW,
        "recipe": dataclasses.asdict(RECIPE), "versions": changes.package_versions(), **meta,
    }  # fmt: skip
    return ResumePoint(path=Path("run/checkpoints/step-9"), completed=10, meta=record)


def compare(
    old: ResumePoint, *allow: str, world_size: int = 2, recipe: Recipe = RECIPE, **now: str
) -> list[str]:
    return changes.check(
        old, recipe, world_size=world_size, now={**NOW, **now}, model_config=None,
        allow_change=allow,
    )  # fmt: skip


def test_an_unchanged_run_goes_on_without_a_word() -> None:
    assert compare(point()) == []


@pytest.mark.parametrize("name", NOW)
def test_each_change_is_refused_with_both_values_and_allowed_by_its_name(name: str) -> None:
    words = rf"{name} was {NOW[name]} and is x9 now: .*--allow-change {name}$"
    with pytest.raises(ConfigError, match=words):
        compare(point(), **{name: "x9"})
    assert compare(point(), name, **{name: "x9"}) == [f"{name} changes from {NOW[name]} to x9"]


def test_all_changes_are_listed_at_once() -> None:
    recipe = {**dataclasses.asdict(RECIPE), "learning_rate": 1.0}
    with pytest.raises(ConfigError, match=r"code was c1 .*learning_rate was 1.0 .*code learning_r"):
        compare(point(recipe=recipe), code="c2")


def test_a_tokenizer_that_is_not_known_yet_is_no_change() -> None:
    assert compare(point(), tokenizer="") == []


def test_a_checkpoint_from_before_the_fingerprint_is_compared_by_what_it_holds() -> None:
    assert compare(point(fingerprint={}), code="c9") == []
    with pytest.raises(ConfigError, match="data was d1"):
        compare(point(fingerprint={}), data="d2")


def test_packages_and_ranks_are_said_and_need_no_permission() -> None:
    lines = compare(point(versions={"torch": "1.0", "gone": "3"}), world_size=3)
    now = changes.package_versions()["torch"]
    assert lines == [
        f"torch changes from 1.0 to {now}", "gone changes from 3 to nothing",
        "run/checkpoints/step-9 was written by 2 ranks, 3 read it",
    ]  # fmt: skip


def test_the_code_is_known_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = changes.code_version.__wrapped__()
    copy = tmp_path / "ds_sft"
    shutil.copytree(Path(ds_sft.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(ds_sft, "__file__", str(copy / "__init__.py"))
    assert changes.code_version.__wrapped__() == here
    with (copy / "recipe/decay.py").open("a") as file:
        file.write("\n")
    assert changes.code_version.__wrapped__() != here


def test_a_changed_chat_template_is_another_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(harness.GOLDEN / "tiny_tokenizer", tmp_path / "t")
    before = changes.tokenizer_version(tmp_path / "t")
    assert changes.tokenizer_version(harness.GOLDEN / "tiny_tokenizer") == before
    (tmp_path / "t/chat_template.jinja").write_text("{{ messages }}")
    assert changes.tokenizer_version(tmp_path / "t") != before


APOLLO = RECIPE.replace(optimizer="apollo", apollo_rank=8).resolved()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            RECIPE,
            APOLLO,
            "the state of --optimizer adamw, which --optimizer apollo --apollo-rank 8",
        ),
        (APOLLO, RECIPE, "of --optimizer apollo --apollo-rank 8, which --optimizer adamw cannot"),
        (APOLLO, APOLLO.replace(apollo_rank=4), "--apollo-rank 8, which .* --apollo-rank 4 cannot"),
        (APOLLO, APOLLO.replace(optimizer="apollo-mini"), "which --optimizer apollo-mini"),
    ],
)
def test_another_optimizers_state_is_refused_whatever_is_allowed(
    old: Recipe, new: Recipe, words: str
) -> None:
    before = point(recipe=dataclasses.asdict(old))
    with pytest.raises(ConfigError, match=words):
        compare(before, "optimizer", "apollo_rank", "apollo_scale", recipe=new)


def test_a_checkpoint_from_before_apollo_is_adamws() -> None:
    fields = dataclasses.asdict(RECIPE)
    older = {k: v for k, v in fields.items() if k != "optimizer" and "apollo" not in k}
    assert compare(point(recipe=older)) == []
    with pytest.raises(ConfigError, match="holds the state of --optimizer adamw"):
        compare(point(recipe=older), recipe=APOLLO)


def test_apollos_scale_may_change_by_its_name() -> None:
    before = point(recipe=dataclasses.asdict(APOLLO))
    other = APOLLO.replace(apollo_scale=2.0)
    with pytest.raises(ConfigError, match=r"apollo_scale was 1.0 and is 2.0 now"):
        compare(before, recipe=other)
    assert "apollo_scale changes" in compare(before, "apollo_scale", recipe=other)[0]


@pytest.mark.parametrize("name", ["code", "tokenizer"])
def test_a_finished_run_that_is_started_again_may_have_other_code(name: str) -> None:
    """It computes no step; one that is made longer does."""
    end = dataclasses.replace(point(), completed=100, is_end=True)
    assert compare(end, **{name: "x9"}) == [f"{name} changes from {NOW[name]} to x9"]
    with pytest.raises(ConfigError, match=f"{name} was {NOW[name]}"):
        compare(end, "num_train_steps", recipe=RECIPE.replace(num_train_steps=120), **{name: "x9"})
    with pytest.raises(ConfigError, match="data was d1"):
        compare(end, data="d2")
