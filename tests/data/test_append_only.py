"""A template that is taken to append only does so; one that looks ahead is never taken for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data.template import ChatTemplate, read_template

GOLDEN = Path(__file__).parents[1] / "golden"
CHATML = json.loads((GOLDEN / "chat_mask.json").read_text())["template"]
PROMPT = "{% if add_generation_prompt %}assistant:{% endif %}"
TURN = "{{ m.role }}:{{ m.content }};"


def appends(template: str) -> bool:
    return ChatTemplate(template, {}).appends_only


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT,
        "{{ bos_token }}{% if messages[0].role == 'system' %}s{% endif %}"
        "{% for m in messages %}{% if loop.first or loop.index0 % 2 %}" + TURN + "{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.name }}{{ ',' if not loop.last }}{% endfor %}"
        "{% endfor %}" + PROMPT,
        "{% set n = namespace(tools=0) %}{% for m in messages %}{% set n.tools = n.tools + 1 %}"
        + TURN
        + "{{ n.tools }}{{ loop.previtem.role if loop.previtem }}{% endfor %}",
    ],
)
def test_one_loop_that_looks_back_only_appends(template: str) -> None:
    assert appends(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}" + TURN + "{{ 'x' if loop.last }}{% endfor %}",
        "{% for m in messages %}" + TURN + "{{ loop['last'] }}{% endfor %}",
        "{% for m in messages %}" + TURN + "{{ loop.nextitem }}{% endfor %}",
        "{% for m in messages %}" + TURN + "{{ loop.revindex }}{% endfor %}",
        "{% for m in messages %}{% set l = loop %}{{ l.last }}{% endfor %}",
        "{% for m in messages %}{% for c in [1] %}{{ messages | length }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ messages[loop.index0 + 1].role }}{% endfor %}",
        "{{ messages[1].role }}{% for m in messages %}" + TURN + "{% endfor %}",
        "{{ messages[-1].role }}{% for m in messages %}" + TURN + "{% endfor %}",
        "{{ messages | length }}{% for m in messages %}" + TURN + "{% endfor %}",
        "{% for m in messages | reverse %}" + TURN + "{% endfor %}",
        "{% for m in messages if loop.last %}" + TURN + "{% endfor %}",
        "{% for m in messages %}" + TURN + "{% endfor %}{{ eos_token }}",
        "{% for m in messages %}" + TURN + "{% endfor %} ",
        "{% for m in messages %}" + TURN + "{% endfor %}"
        "{% if add_generation_prompt %}a{% else %}b{% endif %}",
        "{% for m in messages %}1{% endfor %}{% for m in messages %}" + TURN + "{% endfor %}",
        "{% macro last() %}{{ messages[-1].role }}{% endmacro %}"
        "{% for m in messages %}{{ last() }}{% endfor %}",
        "{% if tools %}{% for m in messages %}" + TURN + "{% endfor %}{% endif %}",
        read_template("qwen3"),
    ],
)
def test_what_could_look_ahead_is_not_taken_to_append(template: str) -> None:
    assert not appends(template)


PARTS = [
    TURN,
    "{{ loop.index0 }}",
    "{{ loop.last }}",
    "{{ loop.length }}",
    "{{ messages[0].content }}",
    "{{ messages[-1].content }}",
    "{{ messages | length }}",
    "{% if loop.first %}first{% endif %}",
    "{% set n.x = n.x + 1 %}{{ n.x }}",
    "{% for c in [1, 2] %}{{ loop.last }}{% endfor %}",
    "{% for c in messages %}{{ c.role }}{% endfor %}",
]
HEAD = st.sampled_from(["", "{{ messages[0].content }}", "{{ messages[-1].content }}", "s"])
BODY = st.lists(st.sampled_from(PARTS), max_size=3).map("".join)
ROUND = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text("ab")}
    ),
    min_size=2,
    max_size=4,
)


@settings(deadline=None, max_examples=80)
@given(HEAD, BODY, st.sampled_from(["", PROMPT, "{{ eos_token }}"]), ROUND)
def test_templates_taken_to_append_write_prefixes(
    head: str, body: str, after: str, messages: list[dict[str, str]]
) -> None:
    source = (
        "{% set n = namespace(x=0) %}"
        + head
        + "{% for m in messages %}"
        + body
        + "{% endfor %}"
        + after
    )
    template = ChatTemplate(source, {"eos_token": "<eos>"})
    if template.appends_only:
        whole = template.render(messages, None)
        for upto in range(1, len(messages)):
            assert whole.startswith(template.render(messages[:upto], None))
