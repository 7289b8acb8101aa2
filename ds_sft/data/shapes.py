"""Shapes of rows -> OpenAI `messages` and `tools`.

Owns which shape a row has (`recognise`, by its keys alone) and how each becomes messages.
Invariant: every shape ends in `records.conversation`, so that the same promises hold of all.

Left to others: a single message's content, calls and weights (`records`), elizaOS records
(`eliza`), and the bytes of a row (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_sft.data import eliza
from ds_sft.data.records import (
    Conversation,
    Message,
    Reject,
    calls_in,
    conversation,
    given,
    kind,
    strict_json,
)

Row = Mapping[str, Any]
UNKNOWN = "unknown"
COLUMNS = ("messages", "prompt", "completion", "tools", "system")
"""Keys that a flag may find under another name."""

_SHAREGPT_ROLES = {"human": "user", "user": "user", "system": "system"}
_SHAREGPT_ROLES |= dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt"), "assistant")
_SHAREGPT_ROLES |= dict.fromkeys(("observation", "tool", "function", "function_response"), "tool")


def recognise(row: Row) -> str:
    """The name of a row's shape, or `unknown`."""
    if row.get("format") == eliza.NATIVE_FORMAT:
        return "eliza-native"
    if row.get("schema") == eliza.TRAJECTORY_SCHEMA:
        return "eliza-trajectory"
    if row.get("messages") is not None:
        return "typed-parts" if _has_typed_parts(row["messages"]) else "messages"
    if row.get("conversations") is not None:
        return "sharegpt"
    if "currentMessage" in row and "expectedResponse" in row:
        return "eliza-flat"
    if row.get("instruction") is not None and row.get("output") is not None:
        return "alpaca"
    if row.get("prompt") is not None and any(row.get(key) is not None for key in _ANSWERS):
        return "prompt-completion"
    return UNKNOWN


def to_conversation(row: Row, shape: str) -> Conversation:
    """The row as a conversation, read as `shape`. Raises Reject."""
    read = READERS.get(shape)
    if read is None:
        keys = ", ".join(map(str, list(row)[:12])) or "none"
        raise Reject("unknown_shape", f"the row's keys are {keys}")
    return read(row)


def _has_typed_parts(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    contents = (turn.get("content") for turn in messages if isinstance(turn, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("value") is not None for part in parts)


def _from_messages(row: Row) -> Conversation:
    messages = _list(row.get("messages"), "messages")
    return conversation(_with_system(row, messages), _tools_of(row))


def _from_sharegpt(row: Row) -> Conversation:
    turns = _list(row.get("conversations"), "conversations")
    messages = [_sharegpt_turn(turn, number) for number, turn in enumerate(turns)]
    return conversation(_with_system(row, messages), _tools_of(row))


def _sharegpt_turn(turn: Any, number: int) -> Any:
    if not isinstance(turn, dict) or turn.get("from") is None:
        return turn  # a message with role and content, or something that `records` refuses
    said, value = turn["from"], turn.get("value")
    rest = {key: turn[key] for key in turn if key not in ("from", "value", "role", "content")}
    if said == "function_call":
        return {**rest, "role": "assistant", "tool_calls": calls_in(value, number)}
    if not isinstance(said, str) or said not in _SHAREGPT_ROLES:
        raise Reject("unknown_role", f"conversations[{number}].from is {said!r}")
    return {**rest, "role": _SHAREGPT_ROLES[said], "content": value}


def _from_alpaca(row: Row) -> Conversation:
    messages: list[Any] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Reject("history_not_pairs", f"`history` is a {kind(history)}")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Reject("history_not_pairs", "`history` holds something else than pairs")
        messages += [_turn("user", pair[0], "history"), _turn("assistant", pair[1], "history")]
    ask = [_text(row.get("instruction"), "instruction"), _text(row.get("input") or "", "input")]
    messages.append(_turn("user", "\n\n".join(filter(None, ask)), "instruction"))
    messages.append(_turn("assistant", row.get("output"), "output"))
    return conversation(_with_system(row, messages), _tools_of(row))


_ANSWERS = ("completion", "response")


def _from_prompt_completion(row: Row) -> Conversation:
    answer = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
    asked, answered = (
        value if isinstance(value, list) else [_turn(role, value, "prompt/completion")]
        for role, value in (("user", row.get("prompt")), ("assistant", answer))
    )
    return conversation(_with_system(row, [*given(asked), *answered]), _tools_of(row))


def _tools_of(row: Row) -> Any:
    """`tools`, or OpenAI's older `functions`, which lack the wrapper."""
    functions = row.get("functions")
    if row.get("tools") is None and isinstance(functions, list):
        return [{"type": "function", "function": function} for function in functions]
    return row.get("tools")


def _with_system(row: Row, messages: list[Any]) -> list[Any]:
    """Put a row's own `system` text first, unless the conversation already begins with one."""
    system = row.get("system")
    first = messages[0] if messages else None
    if (
        system is None
        or system == ""
        or (isinstance(first, dict) and first.get("role") == "system")
    ):
        return messages
    return [_turn("system", system, "system"), *messages]


def _list(value: Any, name: str) -> list[Any]:
    """A list, or the JSON of one, as some tables store it."""
    if isinstance(value, str):
        try:
            value = strict_json(value)
        except ValueError as error:
            raise Reject("messages_not_a_list", f"`{name}` is text, no JSON: {error}") from None
    if not isinstance(value, list):
        raise Reject("messages_not_a_list", f"`{name}` is a {kind(value)}")
    return value


def _turn(role: str, value: Any, name: str) -> Message:
    return {"role": role, "content": _text(value, name)}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Reject("field_not_text", f"`{name}` is a {kind(value)}")
    return value


READERS: dict[str, Callable[[Row], Conversation]] = {
    "messages": _from_messages,
    "typed-parts": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt-completion": _from_prompt_completion,
    "eliza-native": eliza.from_native,
    "eliza-trajectory": eliza.from_trajectory,
    "eliza-flat": eliza.from_flat,
}
KEYS = frozenset(
    {*COLUMNS, "conversations", "functions", "instruction", "input", "output", "history"}
    | {"response", *eliza.KEYS}
)
"""Every key that some shape reads; sources of columns need not read the others."""
