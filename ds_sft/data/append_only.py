"""Whether a chat template only ever appends: a turn is then written the same whatever follows it.

Told from the template's text alone, so that rows of such a template (ChatML, Llama 3, Gemma) are
rendered once, without asking again how each turn looked when it was the last. The answer errs on
one side: False means "not seen to", and costs time only.

What is asked of the text: one loop over `messages` at its top, in which nothing looks ahead (no
`loop.last`, no `messages` but `messages[0]`), and nothing printed after that loop except the
generation prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2.nodes

# What a loop can say of the turns so far. The rest (`last`, `length`, `nextitem`) looks ahead.
_BACKWARD = frozenset({"first", "index", "index0", "previtem", "depth", "depth0"})


def appends_only(template: jinja2.nodes.Template) -> bool:
    """Whether the parsed template is seen to write each turn without regard to later ones."""
    import jinja2.nodes as nodes

    loops = [place for place, node in enumerate(template.body) if _is_message_loop(node)]
    if len(loops) != 1:
        return False
    loop = template.body[loops[0]]
    assert isinstance(loop, nodes.For)
    seen = [*template.body[: loops[0]], *loop.body]
    return all(map(_looks_back, seen)) and all(
        map(_is_generation_prompt, template.body[loops[0] + 1 :])
    )


def _is_message_loop(node: jinja2.nodes.Node) -> bool:
    import jinja2.nodes as nodes

    return (
        isinstance(node, nodes.For)
        and isinstance(node.iter, nodes.Name)
        and node.iter.name == "messages"
        and node.test is None
        and not node.else_
        and not node.recursive
    )


def _is_generation_prompt(node: jinja2.nodes.Node) -> bool:
    import jinja2.nodes as nodes

    if isinstance(node, nodes.Output):
        return all(isinstance(part, nodes.TemplateData) and not part.data for part in node.nodes)
    return (
        isinstance(node, nodes.If)
        and isinstance(node.test, nodes.Name)
        and node.test.name == "add_generation_prompt"
        and not node.elif_
        and not node.else_
    )


def _looks_back(node: jinja2.nodes.Node, *, inner: bool = False) -> bool:
    """Whether neither the node nor what is in it can see a later turn.

    `inner`: in a loop of the turn's own (over its tool calls), whose `loop` says nothing of turns.
    """
    import jinja2.nodes as nodes

    far = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
    if isinstance(node, far):
        return False
    if isinstance(node, nodes.Name):
        return node.name not in ("messages", "loop", "self")
    if isinstance(node, nodes.Getitem) and _is_first_message(node):
        return True
    if isinstance(node, nodes.Getattr) and _is_name(node.node, "loop"):
        return inner or node.attr in _BACKWARD
    if isinstance(node, nodes.For):
        outside = [node.target, node.iter, *([node.test] if node.test else [])]
        return all(_looks_back(part, inner=inner) for part in outside) and all(
            _looks_back(part, inner=True) for part in [*node.body, *node.else_]
        )
    return all(_looks_back(child, inner=inner) for child in node.iter_child_nodes())


def _is_first_message(node: jinja2.nodes.Getitem) -> bool:
    import jinja2.nodes as nodes

    return (
        _is_name(node.node, "messages")
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == 0
    )


def _is_name(node: jinja2.nodes.Node, name: str) -> bool:
    import jinja2.nodes as nodes

    return isinstance(node, nodes.Name) and node.name == name
