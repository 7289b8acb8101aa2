"""elizaOS records -> OpenAI `messages` and `tools`.

Owns the three forms that elizaOS writes: `eliza_native_v1` (a request to a model and its response,
in the AI SDK's terms), `eliza.eliza1_trajectory_record.v1` (messages with a quality), and the flat
record that both replace. Of a request, or a flat record, the response alone is trained, never an
answer of the history; of a trajectory every answer.
Invariant: a record that elizaOS set aside for repair is rejected as `auxiliary_record`.

Left to others: a single message (`records`), and which shape a row has (`shapes`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ds_sft.data.records import (
    ROLES,
    Conversation,
    Message,
    Reject,
    conversation,
    given,
    kind,
    slug,
)

NATIVE_FORMAT = "eliza_native_v1"
NATIVE_BOUNDARIES = ("vercel_ai_sdk.generateText", "vercel_ai_sdk.streamText")
TRAJECTORY_SCHEMA = "eliza.eliza1_trajectory_record.v1"
KEYS = frozenset(
    {"format", "boundary", "request", "response", "schema", "split", "quality", "metadata"}
    | {"agentId", "memoryEntries", "currentMessage", "expectedResponse", "availableActions"}
)

_SYSTEM = (
    "You are {agent}, an autonomous agent. Read the conversation and give the next step: call a "
    "tool with JSON arguments where one fits, otherwise answer in the form that was asked for."
)
_SYSTEM_BY_TASK = {
    "reply": "You are {agent}. Answer the last message; call a tool only where one is needed.",
    "should_respond": (
        "You are {agent}, one of several people in a room. Decide whether the last message wants "
        "an answer from you, and say so in the form that was asked for."
    ),
}
_SYSTEM_BY_TASK["should_respond_with_context"] = _SYSTEM_BY_TASK["should_respond"]
_SYSTEM_BY_TASK["dialogue_routing"] = _SYSTEM_BY_TASK["should_respond"]
_SYSTEM_BY_TASK["routing"] = _SYSTEM_BY_TASK["should_respond"]


def from_native(row: Mapping[str, Any]) -> Conversation:
    """A request and its response; the response is the last turn. Raises Reject."""
    _refuse_auxiliary(row)
    if row.get("boundary") not in NATIVE_BOUNDARIES:
        raise Reject("unknown_boundary", f"`boundary` is {row.get('boundary')!r}")
    request, response = _object(row, "request"), _object(row, "response")
    asked: list[Any] = []
    if isinstance(request.get("messages"), list):
        for number, message in enumerate(request["messages"]):
            asked += _ai_messages(message, number)
    if request.get("prompt") is not None:
        if asked:
            raise Reject("prompt_and_messages", "the request has both `prompt` and `messages`")
        asked = _prompt(request["prompt"])
    system = request.get("system")
    if system and not (asked and asked[0] == {"role": "system", "content": system}):
        asked.insert(0, {"role": "system", "content": system})
    calls = response.get("toolCalls") or []
    if not isinstance(calls, list):
        raise Reject("tool_calls_not_a_list", f"response.toolCalls is a {kind(calls)}")
    answer: Message = {"role": "assistant", "content": response.get("text")}
    answer["tool_calls"] = [_ai_call(call) for call in calls]
    if not answer["tool_calls"] and not answer["content"]:
        raise Reject("empty_response", "the response has neither text nor tool calls")
    return conversation([*given(asked), answer], _ai_tools(request.get("tools")))


def from_trajectory(row: Mapping[str, Any]) -> Conversation:
    """Messages that elizaOS has judged. Raises Reject."""
    _refuse_auxiliary(row)
    if not isinstance(row.get("messages"), list):
        raise Reject("messages_not_a_list", f"`messages` is a {kind(row.get('messages'))}")
    messages = [_ai_messages(message, number) for number, message in enumerate(row["messages"])]
    return conversation([turn for turns in messages for turn in turns], _ai_tools(row.get("tools")))


def from_flat(row: Mapping[str, Any]) -> Conversation:
    """The flat record: a system prompt, the memory, the message and the response. Raises Reject."""
    _refuse_auxiliary(row)
    current = _as_object(row.get("currentMessage")).get("content")
    answer = row.get("expectedResponse")
    for name, value in (("currentMessage.content", current), ("expectedResponse", answer)):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise Reject(f"empty_{slug(name.partition('.')[0])}", f"`{name}` is empty")
        if not isinstance(value, str):
            raise Reject("field_not_text", f"`{name}` is a {kind(value)}")
    memory = row.get("memoryEntries") or []
    if not isinstance(memory, list):
        raise Reject("memory_not_a_list", f"`memoryEntries` is a {kind(memory)}")
    turns = [turn for entry in memory if (turn := _memory_turn(entry)) is not None]
    messages = [
        {"role": "system", "content": _flat_system(row)},
        *given(turns),
        {"role": "user", "content": current},
        {"role": "assistant", "content": answer},
    ]
    return conversation(messages, None)


def _refuse_auxiliary(row: Mapping[str, Any]) -> None:
    for said in (row, _as_object(row.get("metadata"))):
        if said.get("split") in ("repair", "repair_eval"):
            raise Reject("auxiliary_record", f"`split` is {said['split']}")
        quality = _as_object(said.get("quality"))
        if quality.get("success") is False or quality.get("requiresRepair") is True:
            raise Reject("auxiliary_record", "`quality` says that it failed or needs repair")
        if quality.get("rating") == "repair":
            raise Reject("auxiliary_record", "`quality.rating` is repair")


def _ai_messages(message: Any, number: int) -> list[Any]:
    """One message of the AI SDK as OpenAI messages; a tool message may hold several results."""
    if not isinstance(message, dict):
        return [message]
    message = dict(message)
    if isinstance(message.get("toolCalls"), list) and not message.get("tool_calls"):
        message["tool_calls"] = [_ai_call(call) for call in message.pop("toolCalls")]
    parts = message.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return [message]
    if message.get("role") == "tool" and any(part.get("type") == "tool-result" for part in parts):
        return [_tool_result(part, number) for part in parts]
    calls = [_ai_call(part) for part in parts if part.get("type") == "tool-call"]
    message["content"] = [part for part in parts if part.get("type") != "tool-call"]
    if calls:
        message["tool_calls"] = [*(message.get("tool_calls") or []), *calls]
    return [message]


def _tool_result(part: dict[str, Any], number: int) -> Message:
    if part.get("type") != "tool-result":
        kind_of = part.get("type")
        detail = f"messages[{number}].content has a {kind_of!r} part"
        raise Reject(f"content_part_{slug(kind_of)}", detail)
    value = part.get("output", part.get("result"))
    if isinstance(value, dict) and set(value) <= {"type", "value"} and "value" in value:
        value = value["value"]
    content = value if isinstance(value, str) else _json(value)
    message: Message = {"role": "tool", "content": content}
    for name, key in (("tool_call_id", "toolCallId"), ("name", "toolName")):
        if isinstance(part.get(key), str):
            message[name] = part[key]
    return message


def _ai_call(call: Any) -> Any:
    """`{toolCallId, toolName, input}` as an OpenAI tool call; other forms stay as they are."""
    if not isinstance(call, dict) or call.get("toolName") is None:
        return call
    whole: dict[str, Any] = {"id": call.get("toolCallId"), "type": "function"}
    arguments = call.get("input", call.get("args"))
    whole["function"] = {"name": call["toolName"], "arguments": arguments}
    return {key: value for key, value in whole.items() if value is not None}


def _ai_tools(tools: Any) -> Any:
    """AI SDK tool specifications, a list or an object by name, as OpenAI ones."""
    if isinstance(tools, dict):
        tools = [{"name": name, **_as_object(tool)} for name, tool in tools.items()]
    if not isinstance(tools, list):
        return tools
    return [_ai_tool(tool) for tool in tools]


def _ai_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "function" in tool:
        return tool
    schema = tool.get("inputSchema") or tool.get("input_schema") or tool.get("parameters") or {}
    if isinstance(schema, dict) and isinstance(schema.get("jsonSchema"), dict):
        schema = schema["jsonSchema"]
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    filled = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": filled}


def _flat_system(row: Mapping[str, Any]) -> str:
    metadata = _as_object(row.get("metadata"))
    system = metadata.get("system_prompt")
    if not isinstance(system, str) or not system:
        task = metadata.get("task_type")
        text = _SYSTEM_BY_TASK.get(task, _SYSTEM) if isinstance(task, str) else _SYSTEM
        agent = row.get("agentId")
        system = text.format(agent=agent if isinstance(agent, str) and agent else "the assistant")
    if metadata.get("toolSpecs"):
        specs = _json(metadata["toolSpecs"], indent=2)
        system = f"{system.rstrip()}\n\nAvailable tools (JSON):\n{specs}"
    actions = row.get("availableActions")
    if isinstance(actions, list) and actions:
        names = ", ".join(
            action if isinstance(action, str) else _json(action) for action in actions
        )
        system = f"{system.rstrip()}\n\nAvailable actions: {names}"
    return system


def _memory_turn(entry: Any) -> Message | None:
    """A turn of the history; entries of other kinds (facts, reflections) are no turns."""
    entry = _as_object(entry)
    role, content = entry.get("role"), entry.get("content")
    role = ROLES.get(role) if isinstance(role, str) else None
    if role not in ("user", "assistant") or not isinstance(content, str) or not content.strip():
        return None
    return {"role": role, "content": content}


def _prompt(prompt: Any) -> list[Any]:
    if isinstance(prompt, list):
        return [turn for number, item in enumerate(prompt) for turn in _ai_messages(item, number)]
    return [{"role": "user", "content": prompt}]


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent)
    except TypeError as error:  # a value of a table that JSON lacks
        raise Reject("value_not_json", str(error)) from None


def _object(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(row.get(name), dict):
        raise Reject(f"{name}_not_an_object", f"`{name}` is a {kind(row.get(name))}")
    found: dict[str, Any] = row[name]
    return found


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
