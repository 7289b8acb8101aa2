"""Ten thousand mangled rows: each is a conversation or a counted reason, none an exception.

Rows of every shape are mangled in their bytes and in their values, from a fixed seed. The same rows
then go through the whole of `prepare`.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from preparing import run

from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.rows import UNREADABLE, Raw, Reading, parse_row
from ds_sft.data.shapes import READERS, UNKNOWN

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
ASK, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]}
SEEDS: list[dict[str, Any]] = [
    {"messages": [ASK, {**REPLY, "tool_calls": [CALL]}, TOOL, REPLY], "tools": [{"name": "f"}]},
    {"messages": [ASK, {**REPLY, "loss_weight": 0, "reasoning": "hm"}, ASK, REPLY]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "reasoning", "value": "hm"},
                    {"type": "tool_call", "value": '{"name": "f", "arguments": {}}'},
                ],
            },
        ]
    },
    {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "hello"},
        ],
        "tools": '[{"name": "f"}]',
        "system": "be kind",
    },
    {"instruction": "sum", "input": "1 2", "output": "3", "history": [["hi", "hello"]]},
    {"prompt": [ASK], "completion": [REPLY]},
    {
        "format": "eliza_native_v1",
        "boundary": "vercel_ai_sdk.streamText",
        "request": {"system": "s", "messages": [ASK], "tools": {"f": {"inputSchema": {}}}},
        "response": {"text": "x", "toolCalls": [{"toolName": "f", "input": {}}]},
    },
    {
        "schema": "eliza.eliza1_trajectory_record.v1",
        "split": "train",
        "quality": {"success": True},
        "messages": [ASK, REPLY],
    },
    {
        "agentId": "Ada",
        "memoryEntries": [ASK, REPLY],
        "currentMessage": ASK,
        "expectedResponse": "hello",
        "availableActions": ["REPLY"],
        "metadata": {"task_type": "reply", "toolSpecs": [{"name": "f"}]},
    },
]
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    0.5,
    1e308,
    "",
    " ",
    "x",
    "[]",
    "{}",
    "{",
    "\ud800",
    "\x00\x1b[2J",
]
JUNK += [
    [],
    {},
    [None],
    ["x"],
    [[]],
    {"type": "text"},
    {"a": {"b": []}},
    "user",
    "assistant",
    10**30,
]


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside."""
    found = [here] if here else []
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    )
    for key in keys:
        found += places(value[key], (*here, key))
    return found


def mangle_values(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 3)):
        ways = places(row)
        if not ways:
            break
        way = rng.choice(ways)
        holder: Any = row
        for key in way[:-1]:
            holder = holder[key]
        kind = rng.randrange(4)
        if kind == 0:
            del holder[way[-1]]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(way[-1], copy.deepcopy(rng.choice(holder)))
        elif kind == 2 and isinstance(holder, dict):
            holder[rng.choice([*holder, "role", "content", "value", "type"])] = holder.pop(way[-1])
        else:
            holder[way[-1]] = copy.deepcopy(rng.choice(JUNK))
    return row


def mangle_bytes(line: bytes, rng: random.Random) -> bytes:
    raw = bytearray(line)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(max(1, len(raw)))
        kind = rng.randrange(5)
        if kind == 0:
            raw[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del raw[place : place + rng.randint(1, 30)]
        elif kind == 2:
            raw[place:place] = raw[place : place + rng.randint(1, 30)]
        elif kind == 3:
            raw[place:place] = rng.choice(
                [b'"', b"\\", b"{", b"]", b",", b"NaN", b"\\ud800", b"1e999"]
            )
        else:
            del raw[place:]
    return bytes(raw).replace(b"\n", b" ")


def mangled(number: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    lines = []
    for _ in range(number):
        row = rng.choice(SEEDS)
        if rng.random() < 0.6:
            row = mangle_values(row, rng)
        line = json.dumps(row).encode()
        lines.append(mangle_bytes(line, rng) if rng.random() < 0.4 else line)
    return [line for line in lines if line.strip()]


def check_promises(row: Conversation) -> None:
    """What `records` promises of every conversation."""
    roles = [message["role"] for message in row.messages]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert "user" in roles
    assert roles[-1] == "assistant"
    for message in row.messages:
        assert isinstance(message["content"], str)
        assert None not in message.values()
        assert message.get("train", False) is False
        assert not {"weight", "loss_weight"} & set(message)
        assert isinstance(message.get("reasoning_content", ""), str)
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            assert isinstance(function["name"], str)
            assert isinstance(function["arguments"], dict)
    assert row.tools is None or all(isinstance(tool, dict) for tool in row.tools)


def test_every_seed_is_read_as_its_shape() -> None:
    found = [parse_row(json.dumps(row).encode()) for row in SEEDS]
    assert all(isinstance(parsed.result, Conversation) for parsed in found)
    assert {parsed.shape for parsed in found} == set(READERS)


@pytest.mark.parametrize("shape", ["", *READERS])
def test_no_mangled_row_raises_under_any_shape(shape: str) -> None:
    number = 10_000 if not shape else 500
    reading = Reading(shape, {}, 300)
    reasons: Counter[str] = Counter()
    for line in mangled(number, seed=len(shape)):
        parsed = parse_row(line, reading)
        assert parsed.shape in {*READERS, UNKNOWN, UNREADABLE}
        if isinstance(parsed.result, Rejected):
            reasons[parsed.result.reason] += 1
            assert 0 < len(parsed.result.detail) <= 121
            assert parsed.result.detail.isprintable()
        else:
            check_promises(parsed.result)
    if not shape:
        assert len(reasons) > 25
        assert 1000 < reasons.total() < 9500


def test_no_value_of_a_table_raises() -> None:
    rng = random.Random(5)
    rows: list[Raw] = [mangle_values(rng.choice(SEEDS), rng) for _ in range(2000)]
    results = [parse_row(row).result for row in rows]
    assert {type(result) for result in results} == {Conversation, Rejected}


@pytest.mark.slow
def test_ten_thousand_mangled_rows_are_packed_or_counted(tmp_path: Path) -> None:
    lines = mangled(10_000, seed=1)
    data = run(tmp_path, lines, max_rejected=1.0, max_seq_len=512, drop_duplicates=True)
    facts = data.manifest
    counts = facts["counts"]
    assert counts["rows"] == len(lines)
    assert counts["rejected"] == sum(facts["rejected"].values()) > 1000
    assert counts["rows"] == sum(facts["shapes"].values())
    assert counts["tokens"] == int(data.doc_lens.sum())
    assert counts["tokens_in"] == sum(counts[f"tokens{name}"] for name in ("", "_cut", "_dropped"))
    assert set(facts["first_rejected"]) == set(facts["rejected"])
    accepted = counts["rows"] - counts["rejected"]
    assert counts["duplicates"] > 1000
    assert counts["documents"] + counts["dropped_documents"] >= accepted
