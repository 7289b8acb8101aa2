"""Samples train what inference asks for: whole answers, each once, after the prompt as rendered."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conversations import RESULT, SPECIAL, TOOL, answer, calls, check_samples, result, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data.chat import ChatEncoder, Document
from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.template import ChatTemplate, Unrenderable, read_template
from ds_sft.data.tokenizer import load_backend
from ds_sft.data.turns import Sample, Turns
from ds_sft.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden"
BACKEND = load_backend(GOLDEN / "tiny_tokenizer" / "tokenizer.json")
CHATML = json.loads((GOLDEN / "chat_mask.json").read_text())["template"]
QWEN3 = read_template("qwen3")
THOUGHT = "<think>\n\n</think>\n\n"
# As the stock Qwen3 template does: an empty think block, into the last assistant turn only.
REWRITING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Phi-3 does: an end of text, unless an answer is asked for.
ENDING = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- else %}{{ eos_token }}{%- endif %}"
)
TWO = [user("a"), answer("b"), user("c"), answer("d")]


def without_marks(template: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


def both(template: str) -> list[str]:
    return [template, without_marks(template)]


def samples(template: str, messages: list[dict[str, Any]], **choices: Any) -> list[Sample]:
    chosen = {"train_on": "assistant", "thinking": "keep", "on_rewrite": "split", **choices}
    asked = any(turn["role"] == "tool" for turn in messages)
    turns = Turns(ChatTemplate(template, SPECIAL, "x.jinja"), **chosen)
    return turns.samples(Conversation(messages=messages, tools=[TOOL] if asked else None))


def trained(template: str, messages: list[dict[str, Any]], **choices: Any) -> list[list[str]]:
    """The trained texts of each sample."""
    found = samples(template, messages, **choices)
    return [[sample.text[start:end] for start, end in sample.spans] for sample in found]


def reason(template: str, messages: list[dict[str, Any]], **choices: Any) -> str:
    with pytest.raises(Unrenderable) as caught:
        samples(template, messages, **choices)
    return caught.value.reason


# --- a turn that is written otherwise later on ---


@pytest.mark.parametrize("template", both(REWRITING), ids=["marks", "prefixes"])
def test_turns_that_a_template_rewrites_get_a_sample_each(template: str) -> None:
    assert trained(template, TWO) == [[f"{THOUGHT}b<|im_end|>\n"], [f"{THOUGHT}d<|im_end|>\n"]]
    first, second = samples(template, TWO)
    assert (
        first.text
        == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{THOUGHT}b<|im_end|>\n"
    )
    assert THOUGHT + "b" not in second.text


@pytest.mark.parametrize("template", both(REWRITING), ids=["marks", "prefixes"])
def test_refuse_rejects_what_split_splits(template: str) -> None:
    assert reason(template, TWO, on_rewrite="refuse") == "prefix_rewritten"
    assert len(samples(template, TWO[:2], on_rewrite="refuse")) == 1


@pytest.mark.parametrize("template", [*both(CHATML), *both(ENDING)])
def test_turns_that_stay_as_they_were_share_a_sample(template: str) -> None:
    for on_rewrite in ("split", "refuse"):
        assert len(samples(template, TWO, on_rewrite=on_rewrite)) == 1


def test_what_ends_a_text_is_trained_where_the_text_ends_and_missed_nowhere_else() -> None:
    assert trained(ENDING, TWO) == [["b<|end|>\n", "d<|end|>\n<eos>"]]


def test_reasoning_of_a_chain_of_calls_stays_and_shares_its_sample() -> None:
    chain = [user("q"), answer("", "first", tool_calls=calls()), result(), answer("so", "then")]
    [[first, second], [last]] = trained(QWEN3, [*chain, user("more"), answer("end", "hm")])
    assert first.startswith("<think>\nfirst\n</think>\n\n<tool_call>")
    assert second == "<think>\nthen\n</think>\n\nso<|im_end|>\n"
    assert last == "<think>\nhm\n</think>\n\nend<|im_end|>\n"


def test_levanter_trains_the_conversation_as_it_stands() -> None:
    messages = [user("a"), answer("b", "lost"), user("c"), answer("d", "kept")]
    assert trained(QWEN3, messages, on_rewrite="levanter") == [
        ["b<|im_end|>\n", "<think>\nkept\n</think>\n\nd<|im_end|>\n"]
    ]
    with pytest.raises(DataError, match=r"x\.jinja has no .* marks, as --history levanter needs"):
        samples(without_marks(CHATML), TWO, on_rewrite="levanter")


# --- which turns are trained ---


@pytest.mark.parametrize("template", [*both(CHATML), *both(REWRITING)])
def test_last_assistant_trains_one_turn_in_one_sample(template: str) -> None:
    for on_rewrite in ("split", "refuse"):
        [[text]] = trained(template, TWO, train_on="last-assistant", on_rewrite=on_rewrite)
        assert text.removeprefix(THOUGHT) == "d<|im_end|>\n"


@pytest.mark.parametrize("template", both(CHATML), ids=["marks", "prefixes"])
def test_a_turn_that_says_so_is_context_only(template: str) -> None:
    messages = [user("a"), answer("b", train=False), user("c"), answer("d")]
    assert trained(template, messages) == [["d<|im_end|>\n"]]
    assert samples(template, messages)[0].text == samples(template, TWO)[0].text
    messages[3]["train"] = False
    assert reason(template, messages) == "no_trained_token"
    for train_on in ("last-assistant", "all"):
        assert reason(template, messages, train_on=train_on) == "no_trained_token"


def test_the_word_about_training_never_reaches_the_template() -> None:
    telling = CHATML.replace("message.content", "message.train | string + message.content")
    messages = [user("a"), answer("b", train=False), user("c"), answer("d")]
    assert "False" not in samples(telling, messages)[0].text


@pytest.mark.parametrize("template", both(CHATML), ids=["marks", "prefixes"])
def test_all_trains_every_character(template: str) -> None:
    [sample] = samples(template, TWO, train_on="all")
    assert sample.spans == [(0, len(sample.text))]


def test_all_leaves_out_tool_results_and_turns_that_say_so() -> None:
    messages = [
        system("s"),
        user(
            "secret",
        )
        | {"train": False},
        answer("", "why", tool_calls=calls()),
        result(),
        answer("done", "so"),
    ]
    [sample] = samples(QWEN3, messages, train_on="all")
    text = "".join(sample.text[start:end] for start, end in sample.spans)
    assert text == sample.text.replace(f"{RESULT} 0", "").replace("secret", "")
    assert "<|im_start|>user\n<tool_response>\n\n</tool_response>" in text


def test_all_trains_a_rewritten_turn_in_its_own_sample_and_not_where_it_is_rewritten() -> None:
    for template in both(REWRITING):
        [own, rest] = trained(template, TWO, train_on="all")
        assert own == [f"{THOUGHT}b<|im_end|>\n"]
        assert rest == [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
            f"<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n{THOUGHT}d<|im_end|>\n",
        ]
        assert reason(template, TWO, train_on="all", on_rewrite="refuse") == "prefix_rewritten"


def test_all_never_trains_a_document_to_follow_another() -> None:
    encoder = ChatEncoder(ChatTemplate(CHATML, {}), BACKEND, train_on="all")
    [[document]] = encoder.encode([Conversation(messages=TWO, tools=None)])
    assert document.assistant_mask.tolist() == [0] + [1] * (len(document.tokens) - 1)


# --- reasoning ---

THOUGHTFUL = [user("a"), answer("b", "hm"), user("c"), answer("d", "ha")]


def test_strip_history_leaves_the_last_reasoning() -> None:
    for messages in (
        THOUGHTFUL,
        [user("a"), answer("<think>\nhm\n</think>\n\nb"), *THOUGHTFUL[2:]],
    ):
        found = trained(QWEN3, messages, thinking="strip-history")
        assert found == [[f"{THOUGHT}b<|im_end|>\n"], ["<think>\nha\n</think>\n\nd<|im_end|>\n"]]


def test_drop_leaves_no_reasoning() -> None:
    assert trained(without_marks(CHATML), THOUGHTFUL, thinking="drop") == [
        ["b<|im_end|>\n", "d<|im_end|>\n"]
    ]


@pytest.mark.parametrize("content", ["d", "<think>\n \n</think>\n\nd"])
def test_drop_empty_gives_the_empty_block_as_the_prompt_without_thinking_does(content: str) -> None:
    for template in both(QWEN3):
        messages = [user("c"), answer(content, " \n")]
        [sample] = samples(template, messages, thinking="drop-empty")
        [(start, end)] = sample.spans
        asked = ChatTemplate(template, {}).render(
            messages[:1], None, add_generation_prompt=True, enable_thinking=False
        )
        assert sample.text[:start] == asked
        assert asked.endswith(THOUGHT)
        assert sample.text[start:end] == "d<|im_end|>\n"


def test_drop_empty_keeps_reasoning_that_says_something() -> None:
    assert trained(QWEN3, THOUGHTFUL, thinking="drop-empty") == trained(QWEN3, THOUGHTFUL)


def test_a_closing_tag_in_the_middle_of_an_answer_is_text() -> None:
    messages = [user("a"), answer("the tag </think> ends it"), user("c"), answer("d")]
    kept = trained(CHATML, messages, thinking="strip-history")
    assert kept == [["the tag </think> ends it<|im_end|>\n", "d<|im_end|>\n"]]


# --- turns of weight 0 under --history levanter ---

KEPT_AND_LEFT = [
    user("a"),
    answer("b", "lost"),
    user("c"),
    {**answer("no", "hm"), "train": False},
    user("e"),
    answer("f", "end"),
]


def test_levanter_leaves_out_the_marks_of_turns_that_are_not_trained() -> None:
    everything = [{k: v for k, v in turn.items() if k != "train"} for turn in KEPT_AND_LEFT]
    [[first, _, last]] = trained(QWEN3, everything, on_rewrite="levanter")
    assert trained(QWEN3, KEPT_AND_LEFT, on_rewrite="levanter") == [[first, last]]
    (sample,) = samples(QWEN3, KEPT_AND_LEFT, on_rewrite="levanter")
    assert sample.text == samples(QWEN3, everything, on_rewrite="levanter")[0].text
    options = {"on_rewrite": "levanter", "train_on": "last-assistant"}
    assert trained(QWEN3, KEPT_AND_LEFT, **options) == [[last]]
    assert trained(QWEN3, [*KEPT_AND_LEFT[:4], user("more")], on_rewrite="levanter") == [[first]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_of_any_turns_left_out_levanter_trains_the_others(
    turns: list[tuple[bool, bool, bool]],
) -> None:
    messages: list[dict[str, Any]] = []
    for number, (kept, thinks, calling) in enumerate(turns):
        more = {} if kept else {"train": False}
        messages.append(user(f"u{number}"))
        if calling:
            messages += [answer(f"c{number}", tool_calls=calls(2), **more), result(), result(1)]
        messages.append(answer(f"a{number}", f"t{number}" if thinks else "", **more))
    wanted = [f"{t['content']}" for t in messages if t["role"] == "assistant" and "train" not in t]
    if not wanted:
        assert reason(QWEN3, messages, on_rewrite="levanter") == "no_trained_token"
        return
    (spans,) = trained(QWEN3, messages, on_rewrite="levanter")
    assert [re.search(r"[ac]\d", span.split("</think>")[-1])[0] for span in spans] == wanted


def test_a_turn_whose_marks_cannot_be_told_from_anothers_rejects_the_row() -> None:
    joined = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    two = [user("a"), answer("b"), {**answer("c"), "train": False}]
    assert reason(joined, two, on_rewrite="levanter") == "turn_end_unclear"


# --- rows that begin with an assistant turn ---


def test_a_row_that_begins_with_an_assistant_says_so_where_no_prompt_can_be_rendered() -> None:
    needs_one = "{{- messages[0].role[:0] }}"
    greeting = [answer("hello"), *TWO]
    for template in both(CHATML):
        assert len(samples(template, greeting)) == 1
        with pytest.raises(Unrenderable, match="the row begins with an assistant turn") as caught:
            # One turn left out, so that marks are no short cut past the prompt.
            samples(needs_one + template, [*greeting, user("x"), {**answer("y"), "train": False}])
        assert caught.value.reason == "begins_with_assistant"
    raising = "{% if messages|length == 3 %}{{ raise_exception('alone') }}{% endif %}"
    assert reason(raising + without_marks(CHATML), TWO) == "template_error"


# --- what a template leaves out ---


@pytest.mark.parametrize("template", both(CHATML), ids=["marks", "prefixes"])
def test_a_turn_whose_calls_or_reasoning_are_not_written_rejects_the_row(template: str) -> None:
    with pytest.raises(Unrenderable, match="add --thinking drop to train without, or") as caught:
        samples(template, THOUGHTFUL)
    assert caught.value.reason == "reasoning_not_written"
    asked = [user("a"), answer("", tool_calls=calls())]
    assert reason(template, asked) == "tool_calls_not_written"
    first_call = "(message.tool_calls[0].function.name if message.tool_calls else message.content)"
    writes_one = template.replace("message.content", first_call)
    assert trained(writes_one, asked) == [["look_up<|im_end|>\n"]]
    asked[1] = answer("", tool_calls=calls(2))
    assert reason(writes_one, asked) == "tool_calls_not_written"


def test_levanter_gives_up_reasoning_of_earlier_turns_and_never_the_last_ones() -> None:
    assert reason(CHATML, THOUGHTFUL, on_rewrite="levanter") == "reasoning_not_written"
    earlier = [*THOUGHTFUL[:3], answer("d")]
    assert len(samples(CHATML, earlier, on_rewrite="levanter")) == 1
    assert len(samples(read_template("qwen3"), THOUGHTFUL, on_rewrite="levanter")) == 1


def test_a_prompt_with_which_no_answer_begins_is_refused_unless_levanter_is_asked_for() -> None:
    prompt = "{{- '<|im_start|>assistant\n' }}"
    opening = REWRITING.replace(prompt, prompt + "thinking: ")
    assert opening != REWRITING
    with pytest.raises(DataError, match=r"ends its generation prompt with .*thinking:.*levanter"):
        samples(opening, TWO)
    assert len(samples(opening, TWO, on_rewrite="levanter")) == 1
    with pytest.raises(DataError, match="correct that prompt"):
        samples(without_marks(opening), TWO)


def test_marks_round_the_header_do_not_train_what_is_asked() -> None:
    wide = (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{% generation %}"
        "<|assistant|>{{- m.content + '<|end|>' }}{% endgeneration %}"
        "{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
    )
    assert trained(wide, TWO) == [["b<|end|>", "d<|end|>"]]
    assert trained(wide, TWO, on_rewrite="levanter") == [
        ["<|assistant|>b<|end|>", "<|assistant|>d<|end|>"]
    ]


def test_text_between_the_prompt_and_the_marks_is_none_that_inference_shows() -> None:
    late = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% if m.tool_calls %}GAP{% endif %}{% generation %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    asked = [user("q"), answer("", tool_calls=calls()), result(), answer("d")]
    assert reason(late, asked) == "prompt_rewritten"
    assert trained(late, asked, on_rewrite="levanter") == [["look_up<|end|>", "d<|end|>"]]
    assert trained(late, TWO) == [["b<|end|>", "d<|end|>"]]
    always = late.replace("{% if m.tool_calls %}GAP{% endif %}", "GAP")
    with pytest.raises(DataError, match="no answer that it writes begins so"):
        samples(always, TWO)


def test_a_template_that_marks_the_last_turn_only_trains_each_turn_where_it_is_the_last() -> None:
    last_only = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}{% generation %}"
        "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert trained(last_only, TWO) == [["b<|end|>"], ["d<|end|>"]]


@pytest.mark.parametrize("marked", ["true", "m.role != 'user'"])
def test_marks_round_tool_results_and_users_train_neither(marked: str) -> None:
    said = (
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|end|>"
    )
    wide = (
        "{% for m in messages %}<|{{ m.role }}|>{% if MARKED %}{% generation %}SAID"
        "{% endgeneration %}{% else %}SAID{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = wide.replace("SAID", said).replace("MARKED", marked)
    assert ChatTemplate(template, {}).appends_only
    messages = [user("q"), answer("", tool_calls=calls()), result(), answer("done")]
    assert trained(template, messages) == [["look_up<|end|>", "done<|end|>"]]


# --- any conversation ---

PIECES = [
    "",
    "a",
    " b",
    "\n",
    "é",
    "中",
    "🙂",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "</s>",
    "\t",
]
CONTENT = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
REASONING = st.lists(st.sampled_from([*PIECES, "hm", "<think>"]), max_size=3).map("".join)


@st.composite
def conversations(draw: st.DrawFn, rich: bool) -> Conversation:
    """A chat; `rich`: with reasoning, tools and think blocks in the content."""
    messages = [system(draw(CONTENT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(CONTENT)))
        for _ in range(draw(st.integers(0, 2)) if rich else 0):
            count = draw(st.integers(1, 2))
            messages.append(answer(draw(CONTENT), draw(REASONING), tool_calls=calls(count)))
            messages += [result(number) for number in range(count)]
        before = draw(
            st.sampled_from(["", "", "<think>\nhm\n</think>\n\n", "</think>"] if rich else [""])
        )
        messages.append(answer(before + draw(CONTENT), draw(REASONING) if rich else ""))
    return Conversation(messages=messages, tools=[TOOL] if draw(st.booleans()) else None)


@functools.cache
def encoder_of(template: str) -> ChatEncoder:
    return ChatEncoder(ChatTemplate(template, SPECIAL), BACKEND)


@functools.cache
def turns_of(template: str) -> Turns:
    return Turns(ChatTemplate(template, SPECIAL), "assistant", "keep", "split")


def check(template: str, chat: Conversation) -> None:
    check_samples(turns_of(template).samples(chat), template, chat)


@settings(deadline=None, max_examples=40)
@given(conversations(rich=True))
def test_the_shipped_template_trains_every_answer_once_as_it_is_asked(chat: Conversation) -> None:
    check(QWEN3, chat)


@settings(deadline=None, max_examples=60)
@given(conversations(rich=False), st.sampled_from([CHATML, REWRITING, ENDING]))
def test_templates_without_marks_train_every_answer_once_as_it_is_asked(
    chat: Conversation, template: str
) -> None:
    check(without_marks(template), chat)


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(
        st.tuples(conversations(rich=True), st.just(QWEN3)),
        st.tuples(conversations(rich=False), st.sampled_from([CHATML, REWRITING])),
    )
)
def test_marks_and_prefixes_give_the_same_tokens_and_mask(case: tuple[Conversation, str]) -> None:
    chat, template = case
    [by_marks], [by_prefixes] = (encoder_of(text).encode([chat]) for text in both(template))
    assert not isinstance(by_marks, Rejected)
    assert not isinstance(by_prefixes, Rejected)
    assert [plain(document) for document in by_marks] == [plain(d) for d in by_prefixes]
    for document, sample in zip(by_marks, turns_of(template).samples(chat), strict=True):
        kept = document.tokens[document.assistant_mask == 1].tolist()
        text = "".join(sample.text[start:end] for start, end in sample.spans)
        assert BACKEND.decode(kept, skip_special_tokens=False) == text


def plain(document: Document) -> tuple[list[int], list[int]]:
    return document.tokens.tolist(), document.assistant_mask.tolist()
