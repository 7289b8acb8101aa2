"""One chat message at a time -> the form that templates rely on, or a reason why not.

Owns what a `Conversation` promises:

- every `role` is system, user, assistant or tool (other names are translated, `ROLES`);
- every `content` is a string (null becomes "" beside tool calls and is refused elsewhere, a list of
  text parts is joined); reasoning parts and tool calls among an assistant's parts become
  `reasoning_content` and `tool_calls`;
- every tool call's `arguments` is a dict (a JSON string is parsed; "" and null mean {});
- a turn that the row excludes (`train: false`, a `weight` or `loss_weight` of 0) has
  `train: False`; no other turn has the key `train`, and none has a weight;
- `tools` is None or a list of dicts, and a key whose value is null is absent;
- there is a user turn, and the last turn is the assistant's.

What does not fit is a `Rejected` with a short reason, never silence and never another exception.
Left to others: the shapes of whole rows (`shapes`), bytes (`rows`), rendering (`chat`) and counting
the reasons (`report`).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "model", "gpt", "bot", "ai"), "assistant")
ROLES |= {"tool": "tool", "function": "tool"}

_PARTS = ("text",)
_ASSISTANT_PARTS = ("text", "reasoning", "tool_call")

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


class Reject(Exception):
    """Ends the reading of one row; `rows.parse_row` turns it into a `Rejected`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.rejected = Rejected(reason=reason, detail=shorten(detail))


def shorten(text: str, limit: int = 120) -> str:
    """One printable line of at most `limit` characters, for a message on the console."""
    flat = " ".join(text[: 8 * limit].split())
    flat = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in flat
    )
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def slug(value: Any) -> str:
    """A short name for a counted reason, made of whatever a row holds."""
    return re.sub(r"[^a-z0-9]+", "_", str(value).lower())[:24]


def kind(value: Any) -> str:
    """The JSON name of a value's type; Python's for what only tables hold, as a datetime."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    names |= {int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)


def strict_json(text: str) -> Any:
    """Parse JSON that says one thing only: no key twice in an object, no NaN, no infinity.

    Raises ValueError for what is no JSON, Reject for the rest.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise Reject("json_too_deep", "nested beyond what can be read") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise Reject("duplicate_key", f"the key {twice!r} is there twice")
    return whole


def _no_number(name: str) -> NoReturn:
    raise Reject("nan_or_infinity", f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Reject("nan_or_infinity", f"{shorten(text, 20)} is beyond what a number can hold")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite
)


def conversation(messages: Any, tools: Any) -> Conversation:
    """OpenAI `messages` and `tools` as a Conversation. Raises Reject."""
    if not isinstance(messages, list):
        raise Reject("messages_not_a_list", f"`messages` is a {kind(messages)}")
    turns = [_message(item, number) for number, item in enumerate(messages)]
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise Reject("no_assistant_turn", f"roles are {', '.join(roles) or 'none'}")
    if "user" not in roles:
        raise Reject("no_user_turn", f"roles are {', '.join(roles)}")
    if roles[-1] != "assistant":
        raise Reject("last_turn_not_assistant", f"the last turn is the {roles[-1]}'s")
    return Conversation(messages=turns, tools=_tools(tools))


def _role(message: Message) -> str | None:
    """The role under its usual name; None for an unknown one."""
    role = message.get("role")
    return ROLES.get(role) if isinstance(role, str) else None


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, dict):
        raise Reject("message_not_an_object", f"messages[{number}] is a {kind(value)}")
    message = {key: item for key, item in value.items() if item is not None}
    role = _role(message)
    if role is None:
        raise Reject("unknown_role", f"messages[{number}].role is {message.get('role')!r}")
    message["role"] = role
    is_assistant = role == "assistant"
    if message.get("content") == []:
        del message["content"]
    had_content = "content" in message
    calls = _tool_calls(message.pop("tool_calls", []), number)
    if is_assistant and "function_call" in message:
        calls += calls_in(message.pop("function_call"), number)
    if isinstance(message.get("content"), list):
        _split_parts(message, calls, number)
    if calls:
        message["tool_calls"] = calls
    elif not had_content:
        keys = ", ".join(map(str, message))
        detail = f"messages[{number}] has no content; its keys are {keys}"
        raise Reject(f"{role}_without_content", detail)
    content = message.setdefault("content", "")
    if not isinstance(content, str):
        raise Reject("content_not_text", f"messages[{number}].content is a {kind(content)}")
    _alias_reasoning(message, number)
    _settle_training(message, number)
    return message


def given(messages: list[Any]) -> list[Any]:
    """Turns that stand in the prompt: an assistant's among them is not trained."""
    return [
        {**turn, "train": False} if isinstance(turn, dict) and _role(turn) == "assistant" else turn
        for turn in messages
    ]


def _split_parts(message: Message, calls: list[dict[str, Any]], number: int) -> None:
    """Put a list of parts where it belongs: text, the assistant's reasoning, its tool calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    where = f"messages[{number}].content"
    for part in message["content"]:
        if not isinstance(part, dict):
            raise Reject("content_not_text", f"{where} has a {kind(part)}")
        part_kind = part.get("type")
        allowed = _ASSISTANT_PARTS if message["role"] == "assistant" else _PARTS
        if part_kind not in allowed:
            raise Reject(f"content_part_{slug(part_kind)}", f"{where} has a {part_kind!r} part")
        value = part.get("value") if part.get("text") is None else part["text"]
        if part_kind == "tool_call":
            calls.extend(calls_in(part.get("value"), number))
        elif not isinstance(value, str):
            raise Reject("content_not_text", f"{where}: {part_kind} part without text")
        else:
            (texts if part_kind == "text" else thoughts).append(value)
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)


def _alias_reasoning(message: Message, number: int) -> None:
    """Fill `reasoning_content` from its other names, as transformers does at inference."""
    names = ("reasoning_content", "thinking", "reasoning")
    for name in names:
        if name in message:
            if not isinstance(message[name], str):
                raise Reject(
                    "reasoning_not_text", f"messages[{number}].{name} is a {kind(message[name])}"
                )
            message["reasoning_content"] = message[name]
            message.setdefault("thinking", message[name])
            return


def _settle_training(message: Message, number: int) -> None:
    """Leave `train: False` on a turn that the row excludes, and no such key on the others."""
    trained = True
    if "train" in message:
        value = message.pop("train")
        if not isinstance(value, bool):
            raise Reject("train_not_boolean", f"messages[{number}].train is {value!r}")
        trained = value
    for name in ("weight", "loss_weight"):
        if name in message:
            weight = message.pop(name)
            if not isinstance(weight, int | float) or weight not in (0, 1):
                detail = f"messages[{number}].{name} is {weight!r}: a turn is trained (1) or not"
                raise Reject("weight_not_0_or_1", detail)
            trained = trained and bool(weight)
    if not trained:
        message["train"] = False


def _tool_calls(value: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise Reject("tool_calls_not_a_list", f"messages[{number}].tool_calls: {kind(value)}")
    return [_tool_call(call, number) for call in value]


def _tool_call(value: Any, number: int) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Reject("tool_call_malformed", f"messages[{number}]: a tool call without a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except ValueError as error:
            detail = f"messages[{number}]: arguments of {function['name']}: {error}"
            raise Reject("tool_arguments_not_json", detail) from None
    if not isinstance(arguments, dict):
        detail = f"messages[{number}]: arguments of {function['name']} are a {kind(arguments)}"
        raise Reject("tool_arguments_not_an_object", detail)
    whole = {**function, "arguments": arguments}
    return {**value, "function": whole} if "function" in value else whole


def calls_in(value: Any, number: int) -> list[dict[str, Any]]:
    """Tool calls spelt as a value: `{name, arguments}` or a list of them, or the JSON of either."""
    if isinstance(value, str):
        try:
            value = strict_json(value)
        except ValueError as error:
            detail = f"messages[{number}]: a tool call that is not JSON: {error}"
            raise Reject("tool_call_not_json", detail) from None
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise Reject("tool_call_malformed", f"messages[{number}]: an empty list of tool calls")
    return [_tool_call(call, number) for call in calls]


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = strict_json(value)
        except ValueError as error:
            raise Reject("tools_not_json", f"`tools`: {error}") from None
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, list):
        raise Reject("tools_not_a_list", f"`tools` is a {kind(value)}, not a list of objects")
    tools = [_tool(tool) for tool in value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Reject("tools_not_a_list", "`tools` holds something that is not an object")
    return tools


def _tool(value: Any) -> Any:
    """One specification; some data sets store each as the JSON of one."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json(value)
    except ValueError:
        return value
