"""Lines of a chat file -> conversations, or a reason why not.

Owns the shape of what people bring: JSON lines with OpenAI `messages` (`role`, `content`,
`tool_calls`, `reasoning_content`) and optional `tools`. A `Conversation` is what templates may rely
on:

- every `content` is a string (null becomes "", a list of text parts is joined);
- every tool call's `arguments` is a dict (a JSON string is parsed; "" and null mean {});
- `tools` is None or a list of dicts, and a key whose value is null is absent;
- there is a user turn, and the last turn is the assistant's.

Lines are read one at a time as Python objects: `content` mixes strings and lists, which one typed
table cannot hold. A row that does not fit is a `Rejected` with a short reason, never silence and
never an exception. Left to others: rendering (`chat`) and counting the reasons (`prepare`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft.errors import DataError

MAX_LINE_BYTES = 64 * 2**20
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES["tool"] = "tool"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat in the form that templates rely on."""

    messages: list[Message]
    """Turns in order; see the module's text for what holds of each."""
    tools: list[dict[str, Any]] | None
    """Tool specifications; None if the row names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Why a row cannot be trained on."""

    reason: str
    """A slug under which such rows are counted, e.g. `not_json`."""
    detail: str
    """What was seen, in a few words, for the person who looks for the row."""


class _Reject(Exception):
    """Ends the reading of one row; never leaves this module."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.rejected = Rejected(reason=reason, detail=shorten(detail))


def shorten(text: str, limit: int = 120) -> str:
    """One line of at most `limit` characters, for a message on the console."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


class LineReader:
    """The lines of one file as bytes, with the hash of the file once all are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_lines = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (line number from 1, line); None for a line over MAX_LINE_BYTES, blank ones not.

        Memory stays at one line of at most MAX_LINE_BYTES. Raises DataError if the file cannot be
        read.
        """
        try:
            with self.path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    self._take(line)
                    too_long = False
                    rest = line
                    while rest and not rest.endswith(b"\n"):
                        rest = file.readline(MAX_LINE_BYTES)
                        too_long = too_long or bool(rest)
                        self._take(rest)
                    self.num_lines += 1
                    if self.num_lines == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    if too_long:
                        yield self.num_lines, None
                    elif line.strip():
                        yield self.num_lines, line
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from None

    def _take(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)


def parse_row(line: bytes | None) -> Conversation | Rejected:
    """One line of a chat file (None: a line over the limit) as a conversation."""
    try:
        if line is None:
            raise _Reject("line_too_long", f"more than {MAX_LINE_BYTES // 2**20} MiB in one line")
        row = _decode(line)
        messages = _messages(row.get("messages"))
        return Conversation(messages=messages, tools=_tools(row.get("tools")))
    except _Reject as reject:
        return reject.rejected


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Reject("not_utf8", f"byte {error.start}: {error.reason}") from None
    except RecursionError:
        raise _Reject("json_too_deep", "nested beyond what can be read") from None
    except ValueError as error:
        raise _Reject("not_json", str(error)) from None
    if not isinstance(row, dict):
        raise _Reject("not_an_object", f"the row is a {_kind(row)}")
    return row


def _messages(value: Any) -> list[Message]:
    if value is None:
        raise _Reject("no_messages", "the row has no `messages`")
    if not isinstance(value, list):
        raise _Reject("messages_not_a_list", f"`messages` is a {_kind(value)}")
    messages = [_message(item, number) for number, item in enumerate(value)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise _Reject("no_assistant_turn", f"roles are {', '.join(roles) or 'none'}")
    if "user" not in roles:
        raise _Reject("no_user_turn", f"roles are {', '.join(roles)}")
    if roles[-1] != "assistant":
        raise _Reject("last_turn_not_assistant", f"the last turn is the {roles[-1]}'s")
    return messages


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, dict):
        raise _Reject("message_not_an_object", f"messages[{number}] is a {_kind(value)}")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _Reject("unknown_role", f"messages[{number}].role is {role!r}")
    message["role"] = ROLES[role]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], number)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" not in message and role == "assistant" and "tool_calls" not in message:
        raise _Reject("assistant_without_content", f"messages[{number}] has nothing to say")
    message["content"] = _content(message.get("content", ""), number)
    _alias_reasoning(message, number)
    return message


def _alias_reasoning(message: Message, number: int) -> None:
    """Fill `reasoning_content` from its other names, as transformers does at inference."""
    names = ("reasoning_content", "thinking", "reasoning")
    for name in names:
        if name in message:
            if not isinstance(message[name], str):
                raise _Reject(
                    "reasoning_not_text", f"messages[{number}].{name} is a {_kind(message[name])}"
                )
            message["reasoning_content"] = message[name]
            message.setdefault("thinking", message[name])
            return


def _content(value: Any, number: int) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _Reject("content_not_text", f"messages[{number}].content is a {_kind(value)}")
    texts = []
    for part in value:
        if not isinstance(part, dict):
            raise _Reject("content_not_text", f"messages[{number}].content has a {_kind(part)}")
        kind = part.get("type")
        if kind != "text":
            slug = re.sub(r"[^a-z0-9]+", "_", str(kind).lower())[:24]
            raise _Reject(f"content_part_{slug}", f"messages[{number}].content has a {kind!r} part")
        if not isinstance(part.get("text"), str):
            raise _Reject("content_not_text", f"messages[{number}].content: text part without text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(value: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _Reject("tool_calls_not_a_list", f"messages[{number}].tool_calls: {_kind(value)}")
    return [_tool_call(call, number) for call in value]


def _tool_call(value: Any, number: int) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Reject("tool_call_malformed", f"messages[{number}]: a tool call without a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            detail = f"messages[{number}]: arguments of {function['name']}: {error}"
            raise _Reject("tool_arguments_not_json", detail) from None
    if not isinstance(arguments, dict):
        detail = f"messages[{number}]: arguments of {function['name']} are a {_kind(arguments)}"
        raise _Reject("tool_arguments_not_an_object", detail)
    whole = {**function, "arguments": arguments}
    return {**value, "function": whole} if "function" in value else whole


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _Reject("tools_not_json", f"`tools`: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _Reject("tools_not_a_list", f"`tools` is a {_kind(value)}, not a list of objects")
    return value


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
