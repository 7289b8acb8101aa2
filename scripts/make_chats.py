#!/usr/bin/env python3
"""Write the quickstart's chat data: conversations as JSON lines in OpenAI's `messages` shape.

Owns the text of the bundled data set. It is generated, not stored: the same seed and count give the
same bytes on every machine (only `random.Random` and the calendar are used), which a test freezes.
Every answer is computed, so the data never teaches a wrong fact. Standard library only.
Leaves tokenizing, masking and packing to `ds-sft prepare`.

    python scripts/make_chats.py --out chats.jsonl --count 400 --seed 0
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Chat = dict[str, Any]
Turns = list[tuple[str, str]]

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Portugal": "Lisbon",
    "Vietnam": "Hanoi",
    "Austria": "Vienna",
    "Chile": "Santiago",
    "Greece": "Athens",
}
ELEMENTS = {
    "hydrogen": ("H", 1),
    "helium": ("He", 2),
    "carbon": ("C", 6),
    "nitrogen": ("N", 7),
    "oxygen": ("O", 8),
    "sodium": ("Na", 11),
    "iron": ("Fe", 26),
    "silver": ("Ag", 47),
    "gold": ("Au", 79),
}
LEGS = {"spider": 8, "cat": 4, "ant": 6, "hen": 2, "crab": 10, "horse": 4, "bee": 6}
WORDS = [
    "lantern",
    "river",
    "copper",
    "window",
    "garden",
    "planet",
    "button",
    "thunder",
    "marble",
    "pepper",
    "ladder",
    "saddle",
    "winter",
    "basket",
    "cactus",
    "violin",
    "harbor",
    "mirror",
    "pocket",
    "anchor",
]
NAMES = [
    "Ada",
    "Bruno",
    "Carla",
    "Deniz",
    "Emil",
    "Farah",
    "Goran",
    "Hana",
    "Ivo",
    "Jun",
    "Kofi",
    "Lena",
]
GOODS = {"apple": 2, "notebook": 3, "lamp": 24, "chair": 45, "pen": 1, "kettle": 31, "rug": 60}
CITIES = tuple(CAPITALS.values())
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy")
SYSTEMS = (
    "You are a helpful assistant.",
    "You answer in one or two short sentences.",
    "You are a patient tutor. Show the working.",
)


def arithmetic(rng: random.Random) -> Turns:
    """A sum with its follow-up, which needs the first answer."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 20)
    word, sign, value = rng.choice(
        [("plus", "+", a + b), ("minus", "-", a - b), ("times", "*", a * b)]
    )
    turns = [
        (
            rng.choice([f"What is {a} {word} {b}?", f"Compute {a} {sign} {b}."]),
            f"{a} {sign} {b} = {value}.",
        )
    ]
    if rng.random() < 0.7:
        turns.append((f"Now add {c} to that.", f"{value} + {c} = {value + c}."))
    if rng.random() < 0.4:
        turns.append(("Is the first result even?", "Yes." if value % 2 == 0 else "No, it is odd."))
    return turns


def word_problem(rng: random.Random) -> Turns:
    """A small story with its working in steps."""
    who, item = rng.choice(NAMES), rng.choice(sorted(GOODS))
    count, price = rng.randint(2, 9), GOODS[item]
    paid = -(-count * price // 10) * 10
    return [
        (
            f"{who} buys {count} {item}s at {price} euros each and pays with {paid} euros. "
            "How much change is given?",
            f"The {item}s cost {count} * {price} = {count * price} euros. "
            f"The change is {paid} - {count * price} = {paid - count * price} euros.",
        )
    ]


def lookup(rng: random.Random) -> Turns:
    """Two or three facts out of the small tables above."""
    country = rng.choice(sorted(CAPITALS))
    element = rng.choice(sorted(ELEMENTS))
    animal = rng.choice(sorted(LEGS))
    symbol, number = ELEMENTS[element]
    article = "an" if animal[0] in "aeiou" else "a"
    turns = [
        (f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."),
        (
            f"What is the chemical symbol of {element}?",
            f"The symbol of {element} is {symbol}. Its atomic number is {number}.",
        ),
        (
            f"How many legs has {article} {animal}?",
            f"{article.capitalize()} {animal} has {LEGS[animal]} legs.",
        ),
    ]
    rng.shuffle(turns)
    return turns[: rng.randint(2, 3)]


def strings(rng: random.Random) -> Turns:
    """Tasks on letters and words."""
    word, other, third = rng.sample(WORDS, 3)
    letter = rng.choice(word)
    ordered = ", ".join(sorted([word, other, third]))
    turns = [
        (f"Reverse the word {word}.", word[::-1]),
        (f"Write {word} in capital letters.", word.upper()),
        (
            f"How often does the letter {letter} occur in {word}?",
            f"The letter {letter} occurs {times(word.count(letter))} in {word}.",
        ),
        (f"Sort these words: {word}, {other}, {third}.", ordered),
        (f"Spell {word}.", "-".join(word)),
    ]
    rng.shuffle(turns)
    return turns[: rng.randint(1, 3)]


def times(count: int) -> str:
    """`count` in words: once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def dates(rng: random.Random) -> Turns:
    """Calendar questions about days of 2000 to 2039."""
    day = datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(40 * 365))
    ahead = rng.randint(2, 40)
    later = day + datetime.timedelta(days=ahead)
    turns = [
        (f"Which weekday is {day.isoformat()}?", f"{day.isoformat()} is a {weekday(day)}."),
        (
            f"And {ahead} days later?",
            f"{ahead} days later it is {later.isoformat()}, a {weekday(later)}.",
        ),
    ]
    if rng.random() < 0.5:
        leap = (day.replace(month=12, day=31) - day.replace(month=1, day=1)).days == 365
        answer = "has 366 days, so it is a leap year" if leap else "has 365 days: not a leap year"
        turns.append((f"Is {day.year} a leap year?", f"{day.year} {answer}."))
    return turns


def weekday(day: datetime.date) -> str:
    """English weekday; `strftime` would follow the machine's language."""
    names = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    return names[day.weekday()]


def small_talk(rng: random.Random) -> Turns:
    """Greetings and thanks, around a name that has to be remembered."""
    who, food = rng.choice(NAMES), rng.choice(["soup", "rice", "bread", "noodles", "salad"])
    turns = [
        (
            rng.choice([f"Hi, I am {who}.", f"Hello! My name is {who}."]),
            f"Hello {who}, nice to meet you. What can I do for you?",
        ),
        (
            f"I had {food} for lunch.",
            f"{food.capitalize()}? That sounds good. I hope you enjoyed it.",
        ),
        ("Do you remember my name?", f"Yes, your name is {who}."),
        (rng.choice(["Thanks!", "Thank you, bye."]), f"You are welcome, {who}. Have a nice day!"),
    ]
    return turns[: rng.randint(2, 4)]


def function(name: str, description: str, **kinds: str) -> dict[str, Any]:
    """An OpenAI tool description; every parameter is required."""
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    body = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": body}


TOOLS = {
    "get_weather": function("get_weather", "Weather of a city today", city="string"),
    "multiply": function("multiply", "Product of two integers", a="integer", b="integer"),
    "get_stock": function("get_stock", "Number of items in stock", item="string"),
    "get_today": function("get_today", "Today's date"),
}


def call(rng: random.Random, serial: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One tool call. People's files hold `arguments` as an object or as JSON text; so does ours."""
    held: Any = arguments if rng.random() < 0.5 else json.dumps(arguments)
    if not arguments and rng.random() < 0.5:
        held = ""
    body = {"name": name, "arguments": held}
    return {"id": f"call_{serial}", "type": "function", "function": body}


def tool_use(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]], str]:
    """One question that needs tools: (question, [(tool, arguments, result)], final answer)."""
    kind = rng.choice(["weather", "two cities", "multiply", "stock", "today"])
    if kind == "weather":
        city, sky, degrees = rng.choice(CITIES), rng.choice(SKIES), rng.randint(-5, 35)
        result = {"sky": sky, "celsius": degrees}
        return (
            f"How is the weather in {city}?",
            [("get_weather", {"city": city}, result)],
            f"It is {sky} in {city}, at {degrees} degrees.",
        )
    if kind == "two cities":
        first, second = rng.sample(CITIES, 2)
        low, high = sorted(rng.sample(range(-5, 36), 2))
        return (
            f"Is it warmer in {first} or in {second}?",
            [
                ("get_weather", {"city": first}, {"sky": "cloudy", "celsius": low}),
                ("get_weather", {"city": second}, {"sky": "sunny", "celsius": high}),
            ],
            f"It is warmer in {second}: {high} degrees, against {low} in {first}.",
        )
    if kind == "multiply":
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return (
            f"Use the tool to multiply {a} by {b}.",
            [("multiply", {"a": a, "b": b}, {"product": a * b})],
            f"{a} * {b} = {a * b}.",
        )
    if kind == "stock":
        item, left = rng.choice(sorted(GOODS)), rng.randint(0, 30)
        answer = f"There are {left} {item}s in stock." if left else f"We have no {item}s left."
        return f"How many {item}s are left?", [("get_stock", {"item": item}, left)], answer
    day = datetime.date(2024, 1, 1) + datetime.timedelta(days=rng.randrange(700))
    answer = f"Today is {weekday(day)}, {day.isoformat()}."
    return "What day is it today?", [("get_today", {}, day.isoformat())], answer


def tool_chat(rng: random.Random) -> Chat:
    """One or two questions with tool calls, sometimes a plain question in the same chat."""
    messages: list[Message] = []
    used: set[str] = set()
    serial = 0
    for _ in range(rng.randint(1, 2)):
        question, steps, answer = tool_use(rng)
        messages.append({"role": "user", "content": question})
        calls = []
        for name, arguments, _result in steps:
            used.add(name)
            serial += 1
            calls.append(call(rng, serial, name, arguments))
        content = rng.choice([None, "", "Let me look that up."])
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        for made, (name, _arguments, result) in zip(calls, steps, strict=True):
            text = result if isinstance(result, str) else json.dumps(result)
            reply = {"role": "tool", "tool_call_id": made["id"], "name": name, "content": text}
            messages.append(reply)
        messages.append({"role": "assistant", "content": answer})
    if rng.random() < 0.3:
        messages += as_messages(small_talk(rng)[-1:])
    offered = used | {rng.choice(sorted(TOOLS))}
    return {"messages": messages, "tools": [TOOLS[name] for name in sorted(offered)]}


def as_messages(turns: Turns) -> list[Message]:
    """Question and answer pairs as alternating user and assistant messages."""
    messages: list[Message] = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


PLAIN: tuple[Callable[[random.Random], Turns], ...] = (
    arithmetic,
    word_problem,
    lookup,
    strings,
    dates,
    small_talk,
)


def conversations(count: int, seed: int, *, tools: bool = True) -> Iterator[Chat]:
    """Yield `count` conversations; about one in six uses tools, unless `tools` is False.

    Each conversation has a generator of its own, so that a longer file starts with the shorter one.
    """
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        if tools and rng.randrange(6) == 0:
            chat = tool_chat(rng)
        else:
            turns: Turns = []
            for topic in rng.sample(PLAIN, rng.choice([1, 1, 2])):
                turns += topic(rng)
            chat = {"messages": as_messages(turns)}
        if rng.random() < 0.3:
            chat["messages"].insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        yield chat


def write_chats(out: Path, count: int, seed: int, *, tools: bool) -> None:
    """Write the file under a temporary name first: a killed run leaves no half of it behind."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as stream:
        for chat in conversations(count, seed, tools=tools):
            stream.write(json.dumps(chat, ensure_ascii=False) + "\n")
    partial.replace(out)


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write the quickstart's chat data.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file to write")
    parser.add_argument("--count", type=int, default=400, help="conversations (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    parser.add_argument(
        "--no-tools",
        action="store_true",
        help="no tool calls: for chat templates that cannot render them",
    )
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count {args.count} must be at least 1")
    write_chats(args.out, args.count, args.seed, tools=not args.no_tools)
    print(f"wrote {args.out}: {args.count} conversations")


if __name__ == "__main__":
    main()
