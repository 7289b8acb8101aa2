"""An array gives its elements one at a time, whatever is in them and however it is read."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sft.data import json_array
from ds_sft.data.json_array import BrokenArray, elements

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Dripping:
    """A file that gives only so many bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._file = io.BytesIO(data)
        self._step = step

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, self._step))


def split(data: bytes, step: int = 2**20, limit: int = 2**20) -> list[bytes | None]:
    return list(elements(cast(BinaryIO, Dripping(data, step)), limit))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(JSON, max_size=6), step=st.integers(1, 40), indent=st.sampled_from([None, 1]))
def test_the_elements_are_those_that_a_parser_finds(
    rows: list[Any], step: int, indent: int | None
) -> None:
    data = json.dumps(rows, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    found = split(b" \n" + data + b" \n", step)
    assert [
        json.loads((element or b"").decode("utf-8", "surrogatepass")) for element in found
    ] == rows


def test_an_element_that_is_no_json_costs_no_other() -> None:
    assert split(b'[{"a": 1}, {"a": }, nonsense, {"b": [}], "x"]') == [
        b'{"a": 1}',
        b'{"a": }',
        b"nonsense",
        b'{"b": [}]',
        b'"x"',
    ]


def test_nothing_between_commas_is_a_bad_element_and_counted() -> None:
    assert split(b"[1,,2,]") == [b"1", b"", b"2"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[", "does not end"),
        (b'[{"a": 1}', "does not end"),
        (b'[{"a": 1}, {"b": "x', "does not end"),
        (b"[1] 2", "follows the array"),
        (b"[1][2]", "follows the array"),
    ],
)
def test_an_array_that_is_not_whole_is_an_error(data: bytes, what: str) -> None:
    for step in (1, 100):
        with pytest.raises(BrokenArray, match=what):
            split(data, step)


@pytest.mark.parametrize("step", [1, 3, 7, 64, 1000])
@pytest.mark.parametrize(
    "long", [b'"' + b"x" * 50 + b'"', b'{"a": "' + b'\\"' * 40 + b'"}', b"[" + b"1," * 40 + b"1]"]
)
def test_an_element_over_the_limit_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, step: int, long: bytes
) -> None:
    monkeypatch.setattr(json_array, "BLOCK_BYTES", 8)
    assert split(b'["a", ' + long + b', "b"]', step, limit=20) == [b'"a"', None, b'"b"']


def test_memory_stays_at_one_element() -> None:
    row = b'{"text": "' + b"x" * 1000 + b'"}'
    data = b"[" + b",".join([row] * 20_000) + b"]"
    file = io.BytesIO(data)
    tracemalloc.start()
    assert sum(1 for _ in elements(file, 2**20)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20 < len(data) / 5
