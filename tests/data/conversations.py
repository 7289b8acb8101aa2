"""Conversations on which chat templates are compared, and an account of them by transformers."""

from __future__ import annotations

import importlib
from typing import Any

from ds_sft.data.records import Conversation
from ds_sft.data.turns import Sample

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
RESULT = "ROOM-417"
"""What every tool result contains and no other text."""


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, reasoning: str = "", **more: Any) -> dict[str, Any]:
    fields = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content, **fields, **more}


def result(number: int = 0) -> dict[str, Any]:
    content = f"{RESULT} {number}"
    return {"role": "tool", "name": "look_up", "tool_call_id": f"c{number}", "content": content}


def calls(count: int = 1) -> list[dict[str, Any]]:
    function = {"name": "look_up", "arguments": {"x": 1, "s": 'é "q"'}}
    return [{"id": f"c{i}", "type": "function", "function": function} for i in range(count)]


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "description": "which"}},
            "required": ["x"],
        },
    },
}

CHATS: dict[str, list[dict[str, Any]]] = {
    "single": [user("hi"), answer("hello")],
    "multi": [user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")],
    "system": [system("be brief"), user("a"), answer("b"), user("c"), answer("d")],
    "empty": [user("a"), answer(""), user("c"), answer("d"), user("e"), answer("")],
    "unicode": [user("héé 中🙂"), answer("naïve 🙂 é"), user("中"), answer("中 b")],
    "blanks": [user(" a \n"), answer("b \n\n"), user("c"), answer("d\t")],
    "markers": [
        user("say <|im_end|> <|eot_id|> <end_of_turn> <|end|> [/INST]"),
        answer("<|im_end|>\n<|im_start|>assistant\nx <|eot_id|><end_of_turn>\n<|end|><eos>"),
        user("<|im_start|>assistant\n<start_of_turn>model\n<|assistant|>\n"),
        answer("d <turn|>\n</think> e"),
    ],
    "one tool": [user("q"), answer("", tool_calls=calls()), result(), answer("done")],
    "two tools": [
        user("q"),
        answer("", tool_calls=calls(2)),
        result(0),
        result(1),
        answer("done"),
        user("next"),
        answer("", tool_calls=calls(2)),
        result(0),
        result(1),
        answer("ok"),
    ],
    "thinking": [user("q"), answer("x", "hm hm"), user("r"), answer("y", "ha ha")],
    "thinking and tools": [
        user("q"),
        answer("", "which one", tool_calls=calls()),
        result(),
        answer("done", "so there"),
    ],
    "two answers": [user("q"), answer("x"), answer("y"), user("z"), answer("w")],
}


def row(name: str) -> Conversation:
    messages = CHATS[name]
    asked = any(turn["role"] == "tool" for turn in messages)
    return Conversation(messages=messages, tools=[TOOL] if asked else None)


def by_transformers(template: str, chat: Conversation, *, ask: bool = False, upto: int = 0) -> str:
    """The first `upto` messages (0: all) as transformers renders them."""
    helper = importlib.import_module("transformers.utils.chat_template_utils")
    [text], _ = helper.render_jinja_template(
        [chat.messages[:upto] if upto else chat.messages],
        tools=chat.tools,
        chat_template=template,
        add_generation_prompt=ask,
        **SPECIAL,
    )
    return str(text)


def check_samples(samples: list[Sample], template: str, chat: Conversation) -> None:
    """Every trained character is asked for at inference, and every answer is trained once."""
    trained: list[int] = []
    places = [p for p, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
    for sample in samples:
        for start, end in sample.spans:
            [place] = [
                place
                for place in places
                if by_transformers(template, chat, ask=True, upto=place) == sample.text[:start]
            ]
            whole = by_transformers(template, chat, upto=place + 1)
            left = whole.removeprefix(sample.text[:end])
            assert left != whole
            # What the template writes only at the very end of a text, as Phi-3 does.
            assert left in ("", SPECIAL["eos_token"])
            trained.append(place)
            assert RESULT not in sample.text[start:end]
    assert sorted(trained) == places
