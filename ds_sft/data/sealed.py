"""A JSON file that carries the sha256 of its own text, so that one changed bit in it is seen.

Owns the form of that first member. A list of other files' hashes protects everything but itself:
that is what this is for. Invariant: the text is judged byte by byte, before it is parsed. Files
without the member (written by others, or before it existed) are unsealed, which is no damage.
Leaves to the callers what to say then, and the reading of the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

KEY = "sha256_of_this_file"
_BLANK = "0" * 64
# Wider than what is written: damage of the member itself must not look like an unsealed file.
_MEMBER = re.compile(rb'^\{\s*"([^"\n]*)":\s*"([^"\n]{64})"')


def sealed_json(record: Mapping[str, Any], *, indent: int = 1, ensure_ascii: bool = True) -> str:
    """`record` as JSON text whose first member is the sha256 of the text with 64 zeros there.

    A member of that name in `record`, as one that was read has it, is replaced.
    """
    sealed = {KEY: _BLANK, **{name: value for name, value in record.items() if name != KEY}}
    text = json.dumps(sealed, indent=indent, ensure_ascii=ensure_ascii) + "\n"
    return text.replace(_BLANK, hashlib.sha256(text.encode()).hexdigest(), 1)


def is_sealed(raw: bytes) -> bool:
    """Whether the text begins with a hash, its own or a damaged one."""
    return _MEMBER.match(raw) is not None


def is_damaged(raw: bytes) -> bool:
    """Whether a sealed text was changed; False for an unsealed one, of which nothing is known."""
    member = _MEMBER.match(raw)
    if member is None:
        return False
    blank = raw[: member.start(2)] + _BLANK.encode() + raw[member.end(2) :]
    digest = hashlib.sha256(blank).hexdigest().encode()
    return (member[1], member[2]) != (KEY.encode(), digest)
