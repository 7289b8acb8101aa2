"""A sealed JSON text reads as JSON, and any one changed bit of it is noticed."""

from __future__ import annotations

import hashlib
import json

import pytest

from ds_sft.data.sealed import KEY, is_damaged, is_sealed, sealed_json

RECORD = {"completed": 5, "rate": 1e-08, "names": ["a", "é"], "files": {"a": [3, "0" * 64]}}


def is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_every_flipped_bit_of_the_text_is_found(ensure_ascii: bool) -> None:
    """Found as damage, or by no longer being JSON at all."""
    raw = sealed_json(RECORD, ensure_ascii=ensure_ascii).encode()
    assert is_sealed(raw)
    assert not is_damaged(raw)
    for place in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            assert is_damaged(bytes(changed)) or not is_json(bytes(changed)), (place, bit)


def test_the_hash_is_that_of_the_text_with_zeros_in_its_place() -> None:
    text = sealed_json(RECORD)
    mine = json.loads(text)[KEY]
    assert hashlib.sha256(text.replace(mine, "0" * 64, 1).encode()).hexdigest() == mine
    assert {name: value for name, value in json.loads(text).items() if name != KEY} == RECORD


def test_a_record_that_was_read_is_sealed_anew() -> None:
    text = sealed_json({**json.loads(sealed_json(RECORD)), "completed": 6})
    assert json.loads(text)["completed"] == 6
    assert not is_damaged(text.encode())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', json.dumps(RECORD)])
def test_an_unsealed_text_is_no_damage(text: str) -> None:
    assert not is_sealed(text.encode())
    assert not is_damaged(text.encode())
