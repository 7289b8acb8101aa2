"""Templates render what transformers renders, and the marks are where the template puts them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from ds_sft.data.template import ChatTemplate, Unrenderable, read_template
from ds_sft.errors import DataError

RENDERS = json.loads((Path(__file__).parents[1] / "golden" / "qwen3_renders.json").read_text())
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(scope="module")
def qwen3() -> str:
    return read_template("qwen3")


@pytest.mark.parametrize(
    "case",
    RENDERS["cases"],
    ids=lambda case: f"{case['name']}-{case['add_generation_prompt']}-{len(case['variables'])}",
)
def test_the_shipped_template_renders_the_bytes_of_the_stock_one(case: dict, qwen3: str) -> None:
    template = ChatTemplate(qwen3, case["variables"])
    text = template.render(
        case["messages"], case["tools"], add_generation_prompt=case["add_generation_prompt"]
    )
    assert text == case["text"]


def test_the_shipped_template_trains_think_block_content_calls_and_stop(qwen3: str) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "done"},
    ]
    text, spans = ChatTemplate(qwen3, {}).render_marked(messages, None)
    assert [text[start:end] for start, end in spans] == [
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>\n",
        "<think>\n\n</think>\n\ndone<|im_end|>\n",
    ]
    before = [text[:start] for start, _ in spans]
    assert all(piece.endswith("<|im_start|>assistant\n") for piece in before)


def test_marked_and_plain_rendering_give_the_same_text(qwen3: str) -> None:
    template = ChatTemplate(qwen3, {})
    for case in RENDERS["cases"]:
        text, _ = template.render_marked(case["messages"], case["tools"])
        assert text == template.render(case["messages"], case["tools"])


def test_spans_agree_with_transformers_own_tracker() -> None:
    helper = importlib.import_module("transformers.utils.chat_template_utils")
    text = read_template("qwen3")
    template = ChatTemplate(text, {})
    for case in RENDERS["cases"]:
        [rendered], [spans] = helper.render_jinja_template(
            [case["messages"]],
            tools=case["tools"],
            chat_template=text,
            return_assistant_tokens_mask=True,
        )
        assert template.render_marked(case["messages"], case["tools"]) == (rendered, spans)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% macro m(x) %}{% generation %}{{ x }}{% endgeneration %}{% endmacro %}a{{ m('b') }}",
            "b",
        ),
        ("a{% set x %}{% generation %}b{% endgeneration %}{% endset %}zz{{ x }}c", "b"),
        ("a{% generation %}b{% generation %}c{% endgeneration %}{% endgeneration %}d", "bc"),
        ("a{%- generation -%} b {%- endgeneration -%} c", "b"),
        ("a{% generation %}{% endgeneration %}b", ""),
    ],
)
def test_spans_hold_inside_macros_captures_and_nested_blocks(source: str, expected: str) -> None:
    text, spans = ChatTemplate(source, {}).render_marked(CHAT, None)
    assert "".join(text[start:end] for start, end in spans) == expected


def test_marks_in_a_comment_are_no_marks() -> None:
    assert not ChatTemplate("{# {% generation %} #}x", {}).has_marks
    assert ChatTemplate("{% generation %}x{% endgeneration %}", {}).has_marks


def test_a_text_with_code_points_of_our_markers_is_text(qwen3: str) -> None:
    messages = [{"role": "user", "content": "\ufdd0x\ufdd0"}, {**CHAT[1], "content": "\ufdd1"}]
    text, spans = ChatTemplate(qwen3, {}).render_marked(messages, None)
    assert "user\n\ufdd0x\ufdd0<|im_end|>" in text
    assert [text[start:end] for start, end in spans] == [
        "<think>\n\n</think>\n\n\ufdd1<|im_end|>\n"
    ]


def test_what_a_block_sets_ends_with_it() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source, {}).render(CHAT, None) == "21"


def test_special_tokens_and_filters_are_those_of_transformers() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ {'a': '<é'} | tojson }}{{ 1 if documents is none }}",
        {"bos_token": "<s>"},
    )
    assert template.render(CHAT, None) == '<s>{"a": "<é"}1'


def test_what_a_template_raises_rejects_the_row() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(Unrenderable, match="template_error: ValueError: roles must alternate"):
        template.render(CHAT, None)


def test_a_template_cannot_reach_the_machine() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(Unrenderable, match="template_error: SecurityError"):
        template.render(CHAT, None)


def test_a_broken_template_is_an_error_with_its_line() -> None:
    with pytest.raises(DataError, match=r"chat template my\.jinja, line 2: "):
        ChatTemplate("x\n{% if %}", {}, "my.jinja")


def test_a_template_file_is_read_and_a_missing_one_named(tmp_path: Path) -> None:
    path = tmp_path / "my.jinja"
    path.write_text("hé")
    assert read_template(str(path)) == "hé"
    with pytest.raises(DataError, match=r"nowhere: No such file.*one of qwen3"):
        read_template(str(tmp_path / "nowhere"))
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        read_template(str(path))
