"""elizaOS records of each kind become what their response, last message or target teaches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.rows import parse_row


def native(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "format": "eliza_native_v1",
        "boundary": "vercel_ai_sdk.generateText",
        "request": {"system": "be kind", "messages": [{"role": "user", "content": "hi"}]},
        "response": {"text": "hello"},
        "agentId": "ignored",
        "metadata": {"ignored": True},
    }
    return {**row, **changes}


def trajectory(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    schema = "eliza.eliza1_trajectory_record.v1"
    return {"schema": schema, "split": "train", "messages": messages, **changes}


def flat(**changes: Any) -> dict[str, Any]:
    row = {
        "roomName": "r",
        "agentId": "Ada",
        "memoryEntries": [],
        "currentMessage": {"role": "user", "content": "hi"},
        "expectedResponse": "hello",
        "availableActions": [],
        "metadata": {},
    }
    return {**row, **changes}


def read(row: Any, shape: str) -> Conversation:
    parsed = parse_row(json.dumps(row).encode())
    assert isinstance(parsed.result, Conversation), parsed.result
    assert parsed.shape == shape
    return parsed.result


def reason(row: Any) -> str:
    result = parse_row(json.dumps(row).encode()).result
    assert isinstance(result, Rejected), result
    return result.reason


def turns(row: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages]


def test_a_native_record_teaches_its_response() -> None:
    row = read(native(), "eliza-native")
    assert turns(row) == [("system", "be kind"), ("user", "hi"), ("assistant", "hello")]
    assert row.tools is None


def test_a_native_record_may_ask_with_a_prompt() -> None:
    row = read(native(request={"prompt": "hi"}), "eliza-native")
    assert turns(row) == [("user", "hi"), ("assistant", "hello")]


def test_of_a_native_record_the_response_alone_is_trained() -> None:
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for asked in ("messages", "prompt"):
        row = read(native(request={asked: [*before, before[0]]}), "eliza-native")
        assert [turn.get("train", True) for turn in row.messages] == [True, False, True, True]
        assert row.messages[-1]["content"] == "hello"


def test_a_native_record_asks_in_one_way() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert reason(native(request={"messages": messages, "prompt": "hi"})) == "prompt_and_messages"
    assert turns(read(native(request={"messages": [], "prompt": "hi"}), "eliza-native"))[:1] == [
        ("user", "hi")
    ]


def test_a_system_text_that_is_there_twice_stays_once() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    row = read(native(request={"system": "be kind", "messages": messages}), "eliza-native")
    assert turns(row) == [("system", "be kind"), ("user", "hi"), ("assistant", "hello")]


def test_calls_of_the_response_are_tool_calls() -> None:
    call = {"toolCallId": "1", "toolName": "f", "input": {"a": 1}}
    row = read(native(response={"text": "", "toolCalls": [call]}), "eliza-native")
    function = {"name": "f", "arguments": {"a": 1}}
    assert row.messages[-1]["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert row.messages[-1]["content"] == ""


@pytest.mark.parametrize(
    "tools",
    [
        {"f": {"description": "does", "inputSchema": {"type": "object"}}},
        {"f": {"description": "does", "parameters": {"jsonSchema": {"type": "object"}}}},
        [
            {
                "type": "function",
                "name": "f",
                "description": "does",
                "inputSchema": {"type": "object"},
            }
        ],
    ],
)
def test_tool_specifications_of_the_ai_sdk_become_openai_ones(tools: Any) -> None:
    request = {"prompt": "hi", "tools": tools, "toolChoice": "auto", "settings": {}}
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    expected = [{"type": "function", "function": function}]
    assert read(native(request=request), "eliza-native").tools == expected


def test_messages_of_the_ai_sdk_become_openai_ones() -> None:
    result = {"type": "tool-result", "toolCallId": "1", "toolName": "f"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "text": "hm"},
                {"type": "tool-call", "toolCallId": "1", "toolName": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "tool",
            "content": [
                {**result, "output": {"type": "json", "value": {"b": 2}}},
                {**result, "toolCallId": "2", "result": "three"},
            ],
        },
    ]
    row = read(native(request={"messages": messages}), "eliza-native")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert row.messages[0] == {"role": "user", "content": "hi"}
    assert row.messages[1]["tool_calls"] == [call]
    assert row.messages[1]["reasoning_content"] == "hm"
    assert row.messages[2:4] == [
        {"role": "tool", "content": '{"b": 2}', "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "three", "tool_call_id": "2", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"boundary": "elsewhere"}, "unknown_boundary"),
        ({"request": []}, "request_not_an_object"),
        ({"response": None}, "response_not_an_object"),
        ({"response": {"text": ""}}, "empty_response"),
        ({"response": {"text": 3}}, "content_not_text"),
        ({"response": {"toolCalls": {}, "text": "x"}}, ""),
        ({"response": {"toolCalls": "f"}}, "tool_calls_not_a_list"),
        ({"response": {"toolCalls": [{"toolName": 3}]}}, "tool_call_malformed"),
        ({"request": {}}, "no_user_turn"),
        ({"request": {"messages": [{"role": "system", "content": "x"}]}}, "no_user_turn"),
        ({"split": "repair_eval"}, "auxiliary_record"),
    ],
)
def test_a_native_record_that_teaches_nothing_is_rejected(changes: Any, why: str) -> None:
    if why:
        assert reason(native(**changes)) == why
    else:
        assert turns(read(native(**changes), "eliza-native"))[-1] == ("assistant", "x")


def test_a_trajectory_is_its_messages() -> None:
    row = read(trajectory(tools=[{"name": "f"}], quality={"success": True}), "eliza-trajectory")
    assert turns(row) == [("user", "hi"), ("assistant", "hello")]
    assert row.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {}}},
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"split": "repair"},
        {"split": "repair_eval"},
        {"split": None, "metadata": {"split": "repair"}},
        {"quality": {"success": False}},
        {"quality": {"requiresRepair": True}},
        {"quality": {"rating": "repair"}},
        {"metadata": {"quality": {"success": False}}},
        {"split": "train", "metadata": {"split": "repair"}},
        {"quality": {"success": True}, "metadata": {"quality": {"requiresRepair": True}}},
        {"quality": {"rating": "repair"}, "metadata": {"quality": {"success": True}}},
    ],
)
def test_what_was_set_aside_for_repair_is_auxiliary(changes: dict[str, Any]) -> None:
    assert reason(trajectory(**changes)) == "auxiliary_record"
    assert reason(flat(**changes)) == "auxiliary_record"


def test_a_flat_record_is_prompt_memory_message_and_target() -> None:
    memory = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "system", "content": "a fact"},
        {"role": "user", "content": " "},
        {"content": "a fact without a speaker"},
        "noise",
    ]
    metadata = {"system_prompt": "be kind", "toolSpecs": [{"name": "f"}]}
    row = read(
        flat(memoryEntries=memory, availableActions=["REPLY", "IGNORE"], metadata=metadata),
        "eliza-flat",
    )
    system, *rest = turns(row)
    specs = json.dumps(metadata["toolSpecs"], indent=2)
    assert system[1].startswith("be kind\n\n")
    assert specs in system[1]
    assert system[1].endswith("Available actions: REPLY, IGNORE")
    assert rest == [("user", "one"), ("assistant", "two"), ("user", "hi"), ("assistant", "hello")]
    assert [turn.get("train", True) for turn in row.messages] == [True, True, False, True, True]


def test_actions_that_are_objects_are_written_as_json() -> None:
    actions = ["REPLY", {"name": "MUTE", "when": None, "wie": "ü"}]
    system = read(flat(availableActions=actions), "eliza-flat").messages[0]["content"]
    assert system.endswith(
        '\n\nAvailable actions: REPLY, {"name": "MUTE", "when": null, "wie": "ü"}'
    )


def test_the_task_chooses_the_prompt_of_a_flat_record() -> None:
    prompts = {
        task: read(flat(metadata={"task_type": task}), "eliza-flat").messages[0]["content"]
        for task in ("reply", "should_respond", "routing", "another", "", None)
    }
    assert all("Ada" in prompt for prompt in prompts.values())
    assert prompts["should_respond"] == prompts["routing"]
    assert prompts["another"] == prompts[""] == prompts[None]
    assert len(set(prompts.values())) == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"expectedResponse": ""}, "empty_expectedresponse"),
        ({"expectedResponse": None}, "empty_expectedresponse"),
        ({"expectedResponse": {"text": "x"}}, "field_not_text"),
        ({"currentMessage": {"content": " "}}, "empty_currentmessage"),
        ({"currentMessage": None}, "empty_currentmessage"),
        ({"memoryEntries": "x"}, "memory_not_a_list"),
    ],
)
def test_a_flat_record_without_message_or_target_is_rejected(changes: Any, why: str) -> None:
    assert reason(flat(**changes)) == why
