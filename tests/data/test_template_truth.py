"""Real chat templates, and how each is supported: the table in the README is this test's.

transformers renders every prompt and every answer anew, and the samples are held against that.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import pytest
from conversations import CHATS, SPECIAL, check_samples, row
from fetch import trl_templates

from ds_sft.data.template import ChatTemplate, Unrenderable, read_template
from ds_sft.data.turns import Sample, Turns
from ds_sft.errors import DataError

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Support:
    """What the table says of one template."""

    how: str
    """marks, prefixes, or why it is refused."""
    multi_turn: str
    """Samples of a conversation with three answers: `one`, or `split` (one for each)."""
    tools: str
    """Calls in one turn: none, one, many."""
    thinking: str
    """Reasoning of earlier and of the last answers: `all`, or why the row is rejected."""


PREFIXES, MARKS, NONE = "prefixes", "marks", "-"
LOST = "not written"
TABLE = {
    "qwen3 (shipped)": Support(MARKS, "split", "many", "all"),
    "qwen3": Support(PREFIXES, "split", "many", "all"),
    "qwen3_training": Support(MARKS, "one", "many", "all"),
    "qwen3_instruct_2507": Support(PREFIXES, "one", "many", LOST),
    "qwen3_instruct_2507_training": Support(MARKS, "one", "many", LOST),
    "qwen3_5_think": Support(PREFIXES, "split", "many", "all"),
    "qwen3_5_think_training": Support(MARKS, "one", "many", "all"),
    "qwen2_5": Support(PREFIXES, "one", "many", LOST),
    "qwen2_5_training": Support(MARKS, "one", "many", LOST),
    "llama3": Support(PREFIXES, "one", "none", LOST),
    "llama3_training": Support(MARKS, "one", "none", LOST),
    "llama3_1": Support(PREFIXES, "one", "one", LOST),
    "llama3_2": Support(PREFIXES, "one", "one", LOST),
    "gemma": Support(PREFIXES, "one", "none", LOST),
    "gemma_training": Support(MARKS, "one", "none", LOST),
    "gemma3": Support(PREFIXES, "one", "none", LOST),
    "gemma3_training": Support(MARKS, "one", "none", LOST),
    "gemma4": Support(PREFIXES, "one", "many", LOST),
    "gemma4_v5": Support(PREFIXES, "one", "many", "all"),
    "phi3": Support(PREFIXES, "one", "none", LOST),
    "phi3_training": Support(MARKS, "one", "none", LOST),
    "phi3_5": Support(PREFIXES, "one", "none", LOST),
    "phi3_5_training": Support(MARKS, "one", "none", LOST),
    "gptoss": Support(PREFIXES, "split", "one", "all"),
    "gptoss_training": Support(MARKS, "split", "one", "all"),
    "glm4moe": Support("no stop token", NONE, NONE, NONE),
    "glm4moe_training": Support(MARKS, "one", "many", "all"),
    "deepseekv3": Support("no answer that it writes begins so", NONE, NONE, NONE),
    "deepseekv3_training": Support("no answer that it writes begins so", NONE, NONE, NONE),
    "smolvlm": Support("writes nothing of an assistant's text", NONE, NONE, NONE),
    "smolvlm_training": Support("writes nothing of an assistant's text", NONE, NONE, NONE),
}
SUPPORTED = [name for name, support in TABLE.items() if support.how in (PREFIXES, MARKS)]

REJECTED = {"template_error", "prompt_rewritten", "tool_calls_not_written", "reasoning_not_written"}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        **trl_templates(tmp_path_factory.mktemp("trl")),
        "qwen3 (shipped)": read_template("qwen3"),
    }


def turns_of(text: str, name: str) -> Turns:
    return Turns(ChatTemplate(text, SPECIAL, name), "assistant", "keep", "split")


def samples_of(turns: Turns, name: str) -> list[Sample] | str:
    """The samples of one of the conversations, or why it is rejected."""
    try:
        return turns.samples(row(name))
    except Unrenderable as error:
        return error.reason


def measured(turns: Turns) -> Support:
    multi = samples_of(turns, "multi")
    thinking = samples_of(turns, "thinking")
    several = [number for number in ("one tool", "two tools") if ok(samples_of(turns, number))]
    return Support(
        how=MARKS if turns.template.has_marks else PREFIXES,
        multi_turn="one" if len(multi) == 1 else "split",
        tools={0: "none", 1: "one", 2: "many"}[len(several)],
        thinking="all" if ok(thinking) else LOST,
    )


def ok(samples: list[Sample] | str) -> bool:
    return not isinstance(samples, str)


@pytest.mark.parametrize("name", TABLE)
def test_a_template_is_supported_as_the_table_says(name: str, templates: dict[str, str]) -> None:
    expected = TABLE[name]
    if name in SUPPORTED:
        found = measured(turns_of(templates[name], name))
        assert astuple(found) == astuple(expected)
    else:
        with pytest.raises(DataError, match=expected.how):
            turns_of(templates[name], name)


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_trained_is_what_transformers_renders_at_inference(
    name: str, templates: dict[str, str]
) -> None:
    turns = turns_of(templates[name], name)
    accepted = 0
    for chat in CHATS:
        samples = samples_of(turns, chat)
        if isinstance(samples, str):
            assert samples in REJECTED, chat
        else:
            check_samples(samples, templates[name], row(chat))
            accepted += 1
    assert accepted >= 6


PAIRS = [name for name in TABLE if f"{name}_training" in TABLE and name in SUPPORTED]


@pytest.mark.parametrize("name", PAIRS)
def test_with_and_without_marks_the_same_text_has_the_same_mask(
    name: str, templates: dict[str, str]
) -> None:
    plain = turns_of(templates[name], name)
    marked = turns_of(templates[f"{name}_training"], f"{name}_training")
    compared = 0
    for chat in CHATS:
        by_prefixes, by_marks = samples_of(plain, chat), samples_of(marked, chat)
        if isinstance(by_prefixes, str) or isinstance(by_marks, str):
            assert by_prefixes == by_marks or name == "qwen3", chat
            continue
        texts = {sample.text: sample.spans for sample in by_prefixes}
        for sample in by_marks:
            if sample.text in texts:
                assert sample.spans == texts[sample.text], chat
                compared += 1
    rewrites = TABLE[name].multi_turn != TABLE[f"{name}_training"].multi_turn
    assert compared >= (2 if rewrites else 6)
