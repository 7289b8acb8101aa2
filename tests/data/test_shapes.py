"""Rows of every shape become the same conversation, and the shape is told."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from ds_sft.data.prepare_flags import Format
from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.rows import UNREADABLE, Reading, parse_row
from ds_sft.data.shapes import READERS, UNKNOWN

CALL = {"name": "f", "arguments": {"a": 1}}


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


HELLO = said(("user", "hi"), ("assistant", "hello"))
WITH_SYSTEM = [*said(("system", "be kind")), *HELLO]


def rejected(row: Any, **reading: Any) -> str:
    result = parse_row(json.dumps(row).encode(), Reading(**reading)).result
    assert isinstance(result, Rejected), result
    return result.reason


def read(row: Any, told: str = "", **reading: Any) -> Conversation:
    parsed = parse_row(json.dumps(row).encode(), Reading(**reading))
    assert isinstance(parsed.result, Conversation), parsed.result
    assert not told or parsed.shape == told
    return parsed.result


@pytest.mark.parametrize(
    ("shape", "row", "messages"),
    [
        ("messages", {"messages": HELLO}, HELLO),
        ("messages", {"messages": json.dumps(HELLO)}, HELLO),
        ("messages", {"system": "be kind", "messages": HELLO}, WITH_SYSTEM),
        ("messages", {"system": "no", "messages": WITH_SYSTEM}, WITH_SYSTEM),
        (
            "typed-parts",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "value": "hi"}]},
                    {"role": "assistant", "content": [{"type": "text", "value": "hello"}]},
                ]
            },
            HELLO,
        ),
        (
            "sharegpt",
            {
                "system": "be kind",
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ],
            },
            WITH_SYSTEM,
        ),
        ("sharegpt", {"conversations": HELLO}, HELLO),
        ("alpaca", {"instruction": "hi", "output": "hello"}, HELLO),
        ("alpaca", {"instruction": "hi", "input": "", "output": "hello", "system": ""}, HELLO),
        (
            "alpaca",
            {
                "instruction": "sum",
                "input": "1 2",
                "output": "3",
                "system": "be kind",
                "history": [["hi", "hello"]],
            },
            [*WITH_SYSTEM, *said(("user", "sum\n\n1 2"), ("assistant", "3"))],
        ),
        ("prompt-completion", {"prompt": "hi", "completion": "hello"}, HELLO),
        ("prompt-completion", {"prompt": "hi", "response": "hello"}, HELLO),
        ("prompt-completion", {"prompt": WITH_SYSTEM[:2], "completion": "hello"}, WITH_SYSTEM),
        ("prompt-completion", {"prompt": "hi", "completion": HELLO[1:]}, HELLO),
    ],
)
def test_every_shape_becomes_messages(
    shape: str, row: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert read(row, shape).messages == messages
    assert read(row, shape, shape=shape).messages == messages


@pytest.mark.parametrize(
    ("alias", "role"),
    [
        ("model", "assistant"),
        ("human", "user"),
        ("gpt", "assistant"),
        ("bot", "assistant"),
        ("ai", "assistant"),
        ("function", "tool"),
        ("developer", "system"),
    ],
)
def test_a_role_may_have_another_name(alias: str, role: str) -> None:
    row = read({"messages": [*HELLO, {"role": alias, "content": "x"}, *HELLO]})
    assert row.messages[2] == {"role": role, "content": "x"}


@pytest.mark.parametrize("value", [CALL, [CALL], json.dumps(CALL), json.dumps([CALL])])
def test_a_sharegpt_function_call_is_a_tool_call(value: Any) -> None:
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "hello"},
    ]
    row = read({"conversations": turns, "tools": json.dumps([{"name": "f"}])}, "sharegpt")
    assert row.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert row.messages[2] == {"role": "tool", "content": "2"}
    assert row.tools == [{"name": "f"}]


def test_typed_parts_go_where_they_belong() -> None:
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "value": "I look."},
        {"type": "tool_call", "value": json.dumps(CALL)},
    ]
    row = read({"messages": [*HELLO[:1], {"role": "assistant", "content": parts}]}, "typed-parts")
    answer = row.messages[1]
    assert answer["content"] == "I look."
    assert answer["reasoning_content"] == "hm"
    assert answer["tool_calls"] == [CALL]


@pytest.mark.parametrize("as_text", [False, True])
def test_older_openai_functions_are_tools_and_tool_calls(as_text: bool) -> None:
    said = {**CALL, "arguments": '{"a": 1}'}
    call = {
        "role": "assistant",
        "content": None,
        "function_call": json.dumps(said) if as_text else said,
    }
    row = read({"messages": [*HELLO[:1], call], "functions": [{"name": "f"}]})
    assert row.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert row.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ({}, True),
        ({"loss_weight": 1}, True),
        ({"loss_weight": 1.0, "weight": 1, "train": True}, True),
        ({"loss_weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"train": False}, False),
        ({"train": True, "weight": 0}, False),
    ],
)
def test_a_turn_may_be_left_out_of_training(keys: dict[str, Any], trained: bool) -> None:
    row = read({"messages": [HELLO[0], {**HELLO[1], **keys}]})
    assert row.messages[1] == {**HELLO[1], **({} if trained else {"train": False})}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weight": 0.5}, "weight_not_0_or_1"),
        ({"loss_weight": 2}, "weight_not_0_or_1"),
        ({"loss_weight": "0"}, "weight_not_0_or_1"),
        ({"train": 0}, "train_not_boolean"),
    ],
)
def test_a_weight_between_is_refused_by_name(keys: dict[str, Any], reason: str) -> None:
    assert rejected({"messages": [HELLO[0], {**HELLO[1], **keys}]}) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "unknown_shape"),
        ({}, "unknown_shape"),
        ({"messages": None, "prompt": "x"}, "unknown_shape"),
        ({"messages": "hello"}, "messages_not_a_list"),
        ({"conversations": {"a": 1}}, "messages_not_a_list"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown_role"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "unknown_role"),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": 3}]},
            "content_not_text",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt"}]},
            "assistant_without_content",
        ),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "tool_call_not_json"),
        ({"conversations": [{"from": "function_call", "value": []}]}, "tool_call_malformed"),
        (
            {"messages": [HELLO[0], {**HELLO[1], "function_call": "f(1)"}]},
            "tool_call_not_json",
        ),
        ({"messages": [HELLO[0], {**HELLO[1], "function_call": 3}]}, "tool_call_malformed"),
        (
            {"conversations": [{"from": "human", "text": "x"}, {"from": "gpt", "value": "y"}]},
            "user_without_content",
        ),
        ({"instruction": 3, "output": "x"}, "field_not_text"),
        ({"instruction": "x", "output": ["y"]}, "field_not_text"),
        ({"instruction": "x", "output": "y", "history": "z"}, "history_not_pairs"),
        ({"instruction": "x", "output": "y", "history": [["z"]]}, "history_not_pairs"),
        ({"prompt": {"a": 1}, "completion": "x"}, "field_not_text"),
    ],
)
def test_what_fits_no_shape_is_rejected_by_name(row: Any, reason: str) -> None:
    assert rejected(row) == reason


def test_of_a_prompt_and_its_completion_the_completion_alone_is_trained() -> None:
    prompt = [HELLO[0], {"role": "model", "content": "hello", "train": True}, HELLO[0]]
    row = read({"prompt": prompt, "completion": [HELLO[1], HELLO[0], HELLO[1]]})
    assert row.messages == [
        HELLO[0],
        {**HELLO[1], "train": False},
        HELLO[0],
        *HELLO[::-1],
        HELLO[1],
    ]
    assert read({"prompt": HELLO, "completion": []}).messages[-1]["train"] is False


@pytest.mark.parametrize(
    ("ask", "more", "said"),
    [("x", "y", "x\n\ny"), ("", "y", "y"), ("x", "", "x"), ("", "", ""), ("x", None, "x")],
)
def test_an_instruction_and_its_input_are_joined_if_both_are_there(
    ask: str, more: str | None, said: str
) -> None:
    row = read({"instruction": ask, "input": more, "output": "o"}, "alpaca")
    assert row.messages[0] == {"role": "user", "content": said}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [], "messages": []}', "duplicate_key"),
        (b'{"messages": [{"role": "user", "role": "user"}]}', "duplicate_key"),
        (b'{"a": NaN}', "nan_or_infinity"),
        (b'{"a": -Infinity}', "nan_or_infinity"),
        (b'{"a": 1e999}', "nan_or_infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not_json"),
    ],
)
def test_json_that_says_two_things_is_rejected(line: bytes, reason: str) -> None:
    parsed = parse_row(line)
    assert isinstance(parsed.result, Rejected)
    assert parsed.result.reason == reason
    assert parsed.shape == UNREADABLE


def test_a_shape_may_be_forced() -> None:
    both = {"messages": HELLO, "prompt": "p", "completion": "c"}
    assert read(both).messages == HELLO
    forced = read(both, "prompt-completion", shape="prompt-completion")
    assert forced.messages == said(("user", "p"), ("assistant", "c"))
    assert rejected({"messages": HELLO}, shape="sharegpt") == "messages_not_a_list"


def test_columns_may_have_other_names() -> None:
    row = {"chat": HELLO, "functions_json": '[{"name": "f"}]', "messages": "unrelated"}
    found = read(row, "messages", columns={"messages": "chat", "tools": "functions_json"})
    assert found.messages == HELLO
    assert found.tools == [{"name": "f"}]
    swapped = read({"a": "hello", "prompt": "hi"}, columns={"completion": "a"})
    assert swapped.messages == HELLO


def test_a_row_without_the_named_column_says_so() -> None:
    row = json.dumps({"messages": HELLO, "prompt": "p"}).encode()
    found = parse_row(row, Reading(columns={"messages": "chat"})).result
    assert isinstance(found, Rejected)
    assert found.reason == "unknown_shape"
    said = "the row has no chat (--messages-column); its keys are messages, prompt"
    assert found.detail == said


def test_max_chars_counts_what_the_turns_say() -> None:
    for name in ("reasoning", "thinking", "reasoning_content"):
        row = {"messages": [HELLO[0], {**HELLO[1], name: "0123456789"}]}
        length = len("userhi") + len("assistanthello") + len("0123456789")
        assert read(row, max_chars=length).messages[0] == HELLO[0]
        assert rejected(row, max_chars=length - 1) == "over_max_chars"


def test_max_chars_counts_every_argument_of_a_call() -> None:
    call = {"name": "f", "arguments": {"thinking": "0123456789", "reasoning": "0123456789"}}
    row = {"messages": [HELLO[0], {**HELLO[1], "tool_calls": [call]}]}
    assert rejected(row, max_chars=len("userhiassistanthellof") + 19) == "over_max_chars"


def test_the_flag_names_every_shape() -> None:
    assert get_args(Format) == ("auto", *READERS)
    assert UNKNOWN not in READERS
