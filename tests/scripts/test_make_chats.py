"""The bundled chats: the same bytes everywhere, well formed, and right in what they claim."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Of the file with the default count and seed. It changes only with the generator's text: then
# quickstart's numbers in the documentation have to be measured again.
SHA256_400_SEED_0 = "ca887b2f2da912d871fb19aaeab411c106c8d2bd4108aee2796730b3d04883da"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


make_chats = load_script("make_chats")


@pytest.fixture(scope="module")
def chats() -> list[dict[str, Any]]:
    return list(make_chats.conversations(400, 0))


def test_the_file_has_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    make_chats.write_chats(tmp_path / "chats.jsonl", 400, 0, tools=True)
    digest = hashlib.sha256((tmp_path / "chats.jsonl").read_bytes()).hexdigest()
    assert digest == SHA256_400_SEED_0
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_another_seed_gives_other_chats_and_a_longer_file_starts_with_the_shorter() -> None:
    first = list(make_chats.conversations(20, 0))
    assert first != list(make_chats.conversations(20, 1))
    assert list(make_chats.conversations(30, 0))[:20] == first


def test_conversations_are_varied_and_multi_turn(chats: list[dict[str, Any]]) -> None:
    turns = [sum(m["role"] == "user" for m in chat["messages"]) for chat in chats]
    assert max(turns) >= 5
    assert sum(count > 1 for count in turns) > 200
    assert len({json.dumps(chat) for chat in chats}) > 380


def test_roles_alternate_and_the_last_turn_is_the_assistants(chats: list[dict[str, Any]]) -> None:
    for chat in chats:
        roles = " ".join(message["role"] for message in chat["messages"])
        turn = r"user( assistant( tool)+)? assistant"
        assert re.fullmatch(rf"(system )?{turn}( {turn})*", roles), roles


def test_tool_calls_are_answered_in_order_and_offered(chats: list[dict[str, Any]]) -> None:
    kinds = set()
    for chat in chats:
        offered = {tool["function"]["name"] for tool in chat.get("tools", [])}
        waiting: list[str] = []
        for message in chat["messages"]:
            for call in message.get("tool_calls", []):
                function = call["function"]
                assert function["name"] in offered
                kinds.add(type(function["arguments"]))
                if function["arguments"] and isinstance(function["arguments"], str):
                    assert isinstance(json.loads(function["arguments"]), dict)
                waiting.append(call["id"])
            if message["role"] == "tool":
                assert message["tool_call_id"] == waiting.pop(0)
        assert waiting == []
    assert kinds == {dict, str}


def test_about_a_sixth_uses_tools_and_no_tools_means_none(chats: list[dict[str, Any]]) -> None:
    assert 40 <= sum("tools" in chat for chat in chats) <= 90
    without = list(make_chats.conversations(400, 0, tools=False))
    assert len(without) == 400
    assert "tool" not in json.dumps(without)


def test_the_answers_are_right(chats: list[dict[str, Any]]) -> None:
    sums = days = reversals = 0
    for chat in chats:
        for question, answer in zip(chat["messages"], chat["messages"][1:], strict=False):
            if answer["role"] != "assistant" or not answer["content"]:
                continue
            said = answer["content"]
            for left, value in re.findall(r"(-?\d+ [-+*] \d+) = (-?\d+)", said):
                a, sign, b = left.split()
                result = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
                assert result == int(value)
                sums += 1
            for day, name in re.findall(r"(\d{4}-\d\d-\d\d)(?: is|,) a (\w+day)", said):
                assert datetime.date.fromisoformat(day).strftime("%A") == name
                days += 1
            if question["content"] and question["content"].startswith("Reverse"):
                word = question["content"].split()[-1].rstrip(".")
                assert "".join(reversed(word)) == said
                reversals += 1
    assert min(sums, days, reversals) > 20
