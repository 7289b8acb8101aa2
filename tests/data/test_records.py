"""Every row becomes a conversation that templates can rely on, or a counted reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.rows import parse_row

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def parse(**row: Any) -> Conversation | Rejected:
    return parse_row(json.dumps(row).encode()).result


def accepted(**row: Any) -> Conversation:
    result = parse(**row)
    assert isinstance(result, Conversation), result
    return result


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


def test_an_openai_row_stays_as_it_is() -> None:
    row = accepted(messages=[USER, ANSWER])
    assert row.messages == [USER, ANSWER]
    assert row.tools is None


@pytest.mark.parametrize("arguments", [{"a": 1, "b": [2]}, '{"a": 1, "b": [2]}'])
def test_arguments_may_be_an_object_or_its_json(arguments: Any) -> None:
    row = accepted(messages=[USER, call(arguments)])
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": [2]}
    assert row.messages[1]["content"] == ""


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_empty_arguments_mean_an_empty_object(arguments: Any) -> None:
    row = accepted(messages=[USER, call(arguments)])
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_tool_call_may_come_without_its_function_wrapper() -> None:
    turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}
    row = accepted(messages=[USER, turn])
    assert row.messages[1]["tool_calls"] == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_may_be_a_list_or_its_json(tools: Any) -> None:
    assert accepted(messages=[USER, ANSWER], tools=tools).tools == [{"name": "f"}]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools_are_none(tools: Any) -> None:
    assert accepted(messages=[USER, ANSWER], tools=tools).tools is None


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = accepted(messages=[{"role": "user", "content": parts}, ANSWER])
    assert row.messages[0]["content"] == "ab"


def test_a_developer_turn_is_a_system_turn_and_null_keys_go() -> None:
    developer = {"role": "developer", "content": "x", "name": None}
    row = accepted(messages=[developer, USER, {**ANSWER, "tool_calls": None}])
    assert row.messages[0] == {"role": "system", "content": "x"}
    assert row.messages[2] == ANSWER


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    row = accepted(messages=[USER, {**ANSWER, name: "hm"}])
    assert row.messages[1]["reasoning_content"] == "hm"


def test_an_empty_text_is_a_text() -> None:
    empty = [{"role": role, "content": ""} for role in ("system", "user", "assistant")]
    assert accepted(messages=empty).messages == empty
    parts = {"role": "user", "content": [{"type": "text", "text": ""}]}
    assert accepted(messages=[parts, ANSWER]).messages[0]["content"] == ""


def test_what_a_message_without_content_has_instead_is_named() -> None:
    result = parse(messages=[{"role": "user", "contents": "hi"}, ANSWER])
    assert isinstance(result, Rejected)
    assert result.detail == "messages[0] has no content; its keys are role, contents"


def test_an_empty_answer_is_an_answer() -> None:
    assert (
        accepted(messages=[USER, {"role": "assistant", "content": ""}]).messages[1]["content"] == ""
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json"),
        (b'{"messages": [}', "not_json"),
        (b"[1]", "not_an_object"),
        (b"7", "not_an_object"),
        (b'{"messages": "\xff"}', "not_utf8"),
        (b"[" * 200_000, "json_too_deep"),
        (b'{"a": 1}', "unknown_shape"),
        (b'{"messages": {}}', "messages_not_a_list"),
        (b'{"messages": []}', "no_assistant_turn"),
        (b'{"messages": ["hi"]}', "message_not_an_object"),
        (None, "line_too_long"),
    ],
)
def test_a_line_that_is_no_row_is_rejected(line: bytes | None, reason: str) -> None:
    result = parse_row(line).result
    assert isinstance(result, Rejected)
    assert result.reason == reason
    assert len(result.detail) <= 120


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER], "no_assistant_turn"),
        ([ANSWER], "no_user_turn"),
        ([USER, ANSWER, USER], "last_turn_not_assistant"),
        ([{"role": "alien", "content": ""}, ANSWER], "unknown_role"),
        ([{"role": ["user"], "content": ""}, ANSWER], "unknown_role"),
        ([{"content": ""}, ANSWER], "unknown_role"),
        ([USER, {"role": "assistant"}], "assistant_without_content"),
        ([USER, {"role": "assistant", "content": []}], "assistant_without_content"),
        ([{"role": "user", "contents": "hi"}, ANSWER], "user_without_content"),
        ([{"role": "user", "content": None}, ANSWER], "user_without_content"),
        ([{"role": "user", "content": []}, ANSWER], "user_without_content"),
        ([USER, call({}), {"role": "tool"}, ANSWER], "tool_without_content"),
        ([{"role": "system"}, USER, ANSWER], "system_without_content"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": []}],
            "assistant_without_content",
        ),
        ([{"role": "user", "content": 3}, ANSWER], "content_not_text"),
        ([{"role": "user", "content": ["x"]}, ANSWER], "content_not_text"),
        ([{"role": "user", "content": [{"type": "text"}]}, ANSWER], "content_not_text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}, ANSWER], "content_part_image_url"),
        ([USER, call("{")], "tool_arguments_not_json"),
        ([USER, call("[1]")], "tool_arguments_not_an_object"),
        ([USER, call(3)], "tool_arguments_not_an_object"),
        ([USER, {**ANSWER, "tool_calls": {}}], "tool_calls_not_a_list"),
        ([USER, {**ANSWER, "tool_calls": ["f"]}], "tool_call_malformed"),
        ([USER, {**ANSWER, "tool_calls": [{"function": {}}]}], "tool_call_malformed"),
        ([USER, {**ANSWER, "reasoning_content": ["x"]}], "reasoning_not_text"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_rejected(messages: list[Any], reason: str) -> None:
    result = parse(messages=messages)
    assert isinstance(result, Rejected)
    assert result.reason == reason


@pytest.mark.parametrize(
    ("tools", "reason"),
    [("{", "tools_not_json"), ({"a": 1}, "tools_not_a_list"), (["f"], "tools_not_a_list")],
)
def test_tools_of_another_shape_are_rejected(tools: Any, reason: str) -> None:
    result = parse(messages=[USER, ANSWER], tools=tools)
    assert isinstance(result, Rejected)
    assert result.reason == reason
