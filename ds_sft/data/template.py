"""A chat template: Jinja text -> rendered conversations, with the spans that it marks.

Renders as transformers' `apply_chat_template` does (the same environment, variables and special
tokens), without its cost per row: the text is compiled once. `{% generation %}` blocks become spans
of characters, found by markers that are put round a block's output, so that they are right inside
macros and captured blocks too.

Left to others: which text is trained when a template has no marks, and tokens (`chat`).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_sft.data.append_only import appends_only
from ds_sft.data.records import Message, shorten
from ds_sft.errors import DataError

if TYPE_CHECKING:
    import jinja2

SHIPPED = {"qwen3": "qwen3.jinja"}

# Unicode sets these code points aside for use inside a program; the random part keeps a text that
# holds them all the same from being taken for ours.
_NONCE = secrets.token_hex(8)
_OPEN, _CLOSE = f"\ufdd0{_NONCE}\ufdd0", f"\ufdd1{_NONCE}\ufdd1"
_MARKER = re.compile(f"({_OPEN}|{_CLOSE})")

_DICT_METHODS = frozenset(dir(dict))
# The sandbox watches the format methods: they read attributes of their own accord.
_HARMLESS_STR_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("_") and "format" not in name
)

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None


class Unrenderable(Exception):
    """This row cannot be rendered, or its trained spans cannot be told: reason and detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = shorten(detail)


class ChatTemplate:
    """A compiled template.

    `has_marks`: it says itself what is trained. `appends_only`: it is seen to write each turn
    without regard to later ones.
    """

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], name: str = "template"
    ) -> None:
        """`special_tokens` are the tokenizer's by name (`eos_token`, ...), which templates print.

        Raises DataError if the text is no Jinja template.
        """
        self.text = text
        self.name = name
        self._special_tokens = dict(special_tokens)
        self._template, self.has_marks, self.appends_only = self._compile()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as text, without markers. Raises Unrenderable.

        `variables` are what `apply_chat_template` would hand on (`enable_thinking`, ...).
        """
        text = self._render(messages, tools, add_generation_prompt, **variables)
        return _MARKER.sub("", text) if self.has_marks else text

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The conversation and the spans of characters that its marks enclose. Raises Unrenderable.

        Spans are in order, not empty and apart: a block inside a block adds nothing, blocks with
        nothing between them are one.
        """
        marked = self._render(messages, tools, False)
        pieces: list[str] = []
        spans: list[Span] = []
        depth = start = length = 0
        for piece in _MARKER.split(marked):
            if piece == _OPEN:
                start = length if depth == 0 else start
                depth += 1
            elif piece == _CLOSE:
                depth -= 1
                if depth == 0 and length > start:
                    joined = spans.pop()[0] if spans and spans[-1][1] == start else start
                    spans.append((joined, length))
            else:
                pieces.append(piece)
                length += len(piece)
        return "".join(pieces), spans

    def _render(
        self, messages: Sequence[Message], tools: Tools, prompt: bool, **variables: Any
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
                **variables,
            )
        # A template is a program of somebody else: it may fail in any way, for this row alone.
        except Exception as error:
            raise Unrenderable("template_error", f"{type(error).__name__}: {error}") from None

    def _compile(self) -> tuple[jinja2.Template, bool, bool]:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        marks_seen: list[int] = []

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012 (jinja's own declaration of a tag)

            def parse(self, parser: Parser) -> jinja2.nodes.Node:
                line = next(parser.stream).lineno
                marks_seen.append(line)
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                start, end = (
                    jinja2.nodes.Output([jinja2.nodes.TemplateData(marker)])
                    for marker in (_OPEN, _CLOSE)
                )
                # What the block sets ends with it, as in transformers.
                return jinja2.nodes.Scope([start, *body, end]).set_lineno(line)

        class Environment(ImmutableSandboxedEnvironment):
            def getattr(self, obj: Any, attribute: str) -> Any:
                # `turn.role` and `turn.content.strip`: the sandbox gives the same after a dozen
                # checks, which are a third of all rendering.
                if type(obj) is dict and attribute not in _DICT_METHODS:
                    if attribute in obj:
                        return obj[attribute]
                    return self.undefined(obj=obj, name=attribute)
                if type(obj) is str and attribute in _HARMLESS_STR_METHODS:
                    return getattr(obj, attribute)
                return super().getattr(obj, attribute)

        environment = Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            template = environment.from_string(self.text)
            return template, bool(marks_seen), appends_only(environment.parse(self.text))
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"chat template {self.name}, line {error.lineno}: {error.message}: correct it or "
                "choose another --chat-template"
            ) from None


def read_template(choice: str) -> str:
    """The text of a shipped template (`qwen3`) or of a file. Raises DataError."""
    if choice in SHIPPED:
        shipped = resources.files("ds_sft.data") / "templates" / SHIPPED[choice]
        return shipped.read_text(encoding="utf-8")
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(
            f"--chat-template {choice}: {reason}: give a file, one of {', '.join(SHIPPED)}, or "
            "leave it out to use the tokenizer's"
        ) from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
