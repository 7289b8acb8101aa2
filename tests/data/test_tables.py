"""Tables give the rows that JSON lines would: nulls of structs are absent keys, places are rows."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ds_sft.data import tables
from ds_sft.data.records import Conversation, Rejected
from ds_sft.data.rows import parse_row
from ds_sft.data.tables import DatasetSource, ParquetSource
from ds_sft.errors import DataError

ANY: frozenset[str] = frozenset()


def parquet(path: Path, rows: list[dict[str, Any]] | pa.Table, **how: Any) -> Path:
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(table, path, **how)
    return path


def read(source: ParquetSource | DatasetSource) -> list[Any]:
    return [row for batch in source.batches() for row in tables.to_rows(tables.to_bytes(batch))]


def parsed(path: Path) -> list[Conversation | Rejected]:
    return [parse_row(row).result for row in read(ParquetSource(path))]


def chats(number: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"ask {place}"},
                {"role": "assistant", "content": f"reply {place}"},
            ]
        }
        for place in range(number)
    ]


def test_a_parquet_file_gives_its_rows_in_order(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", chats(1000), row_group_size=300)
    source = ParquetSource(path)
    assert source.count_rows() == 1000
    assert read(source) == chats(1000)
    assert source.facts() == {
        "path": str(path),
        "bytes": path.stat().st_size,
        "lines": 1000,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def test_a_null_field_is_a_key_that_is_not_there(tmp_path: Path) -> None:
    calls = [{"arguments": {"a": 1}}, {"arguments": {"b": "x", "c": [1, None]}}]
    path = parquet(tmp_path / "a.parquet", [{"messages": [call]} for call in calls])
    assert read(ParquetSource(path)) == [{"messages": [call]} for call in calls]


def test_columns_that_no_shape_reads_are_left_out_unless_there_is_no_other(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user"}], "image": b"\xff" * 100, "mine": "x"}
    path = parquet(tmp_path / "a.parquet", [row])
    assert read(ParquetSource(path)) == [{"messages": [{"role": "user"}]}]
    assert read(ParquetSource(path, frozenset({"mine"})))[0]["mine"] == "x"
    path = parquet(tmp_path / "b.parquet", [{"text": "x"}])
    assert read(ParquetSource(path)) == [{"text": "x"}]


def test_a_number_that_json_lacks_rejects_its_row(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "output": [1.5, float("nan")]})
    first, second = read(ParquetSource(parquet(tmp_path / "a.parquet", table)))
    assert first == {"prompt": "a", "output": 1.5}
    assert isinstance(second, Rejected)
    assert second.reason == "nan_or_infinity"


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(3)])
def test_bytes_are_the_text_that_they_are_or_refused(tmp_path: Path, kind: pa.DataType) -> None:
    prompts = pa.array([b"one", "é1".encode(), b"\xff\xfe1"], kind)
    table = pa.table({"prompt": prompts, "completion": ["a", "b", "c"]})
    first, second, third = parsed(parquet(tmp_path / "a.parquet", table))
    assert isinstance(first, Conversation)
    assert first.messages[0]["content"] == "one"
    assert isinstance(second, Conversation)
    assert second.messages[0]["content"] == "é1"
    assert third == Rejected(reason="field_not_text", detail="`prompt/completion` is a bytes")


def test_bytes_are_texts_inside_of_structs_lists_maps_and_dictionaries(tmp_path: Path) -> None:
    table = pa.table(
        {
            "messages": pa.array([[{"a": b"x"}]], pa.list_(pa.struct([("a", pa.binary())]))),
            "metadata": pa.array([[(b"k", b"v")]], pa.map_(pa.binary(), pa.binary())),
            "split": pa.array([b"train"]).dictionary_encode(),
        }
    )
    rows = read(ParquetSource(parquet(tmp_path / "a.parquet", table)))
    assert rows == [{"messages": [{"a": "x"}], "metadata": {"k": "v"}, "split": "train"}]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime.datetime(2026, 1, 2), "datetime"),
        (datetime.date(2026, 1, 2), "date"),
        (datetime.time(1, 2), "time"),
        (datetime.timedelta(1), "timedelta"),
        (decimal.Decimal("1.5"), "Decimal"),
    ],
)
def test_a_value_that_json_lacks_is_no_text_and_is_refused_by_name(
    tmp_path: Path, value: Any, kind: str
) -> None:
    table = pa.table({"prompt": ["hi"], "completion": [value]})
    (found,) = parsed(parquet(tmp_path / "a.parquet", table))
    assert found == Rejected(reason="field_not_text", detail=f"`prompt/completion` is a {kind}")


def test_a_time_beside_a_message_costs_no_row(tmp_path: Path) -> None:
    rows = chats(1)
    rows[0]["messages"][0]["at"] = datetime.datetime(2026, 1, 2)
    (found,) = parsed(parquet(tmp_path / "a.parquet", rows))
    assert isinstance(found, Conversation)


def test_a_decimal_that_has_to_be_written_as_json_is_refused_by_name(tmp_path: Path) -> None:
    row = {
        "currentMessage": {"content": "hi"},
        "expectedResponse": "hello",
        "metadata": {"toolSpecs": [{"least": decimal.Decimal("1.5")}]},
    }
    (found,) = parsed(parquet(tmp_path / "a.parquet", [row]))
    assert isinstance(found, Rejected)
    assert found.reason == "value_not_json"
    assert "Decimal" in found.detail


def test_maps_and_dictionaries_are_read_as_objects_and_texts(tmp_path: Path) -> None:
    table = pa.table(
        {
            "metadata": pa.array([[("a", "x"), ("b", None)]], pa.map_(pa.string(), pa.string())),
            "split": pa.array(["train"]).dictionary_encode(),
        }
    )
    rows = read(ParquetSource(parquet(tmp_path / "a.parquet", table)))
    assert rows == [{"metadata": {"a": "x"}, "split": "train"}]


@pytest.mark.parametrize("size", [0, 3, 50, -1, -9])
def test_a_parquet_file_that_is_cut_short_is_one_line(tmp_path: Path, size: int) -> None:
    path = parquet(tmp_path / "a.parquet", chats(100))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"a\.parquet, the file.s end cannot be read") as caught:
        read(ParquetSource(path))
    assert "\n" not in str(caught.value)


def test_a_parquet_file_with_wrong_bytes_is_an_error_with_the_row_group(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "a.parquet", chats(1000), row_group_size=500, write_page_checksum=True
    )
    whole = path.read_bytes()
    second = pq.read_metadata(path).row_group(1).column(1)
    start = second.dictionary_page_offset or second.data_page_offset
    place = start + second.total_compressed_size // 2
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
    with pytest.raises(DataError, match=r"a\.parquet, row group 1 cannot be read"):
        read(ParquetSource(path))


def test_the_chosen_rows_of_a_batch_stay_in_order(tmp_path: Path) -> None:
    source = ParquetSource(parquet(tmp_path / "a.parquet", chats(10)))
    (batch,) = source.batches()
    chosen = np.arange(10) % 3 == 1
    some = tables.to_rows(tables.to_bytes(tables.some(batch, chosen)))
    assert some == [row for row, kept in zip(chats(10), chosen, strict=True) if kept]


def test_a_stored_data_set_gives_its_rows(tmp_path: Path) -> None:
    where = str(tmp_path / "set")
    datasets.Dataset.from_list(chats(600)).save_to_disk(where)
    source = DatasetSource(where, "train", "", ANY)
    assert read(source) == chats(600)
    assert source.facts()["lines"] == source.count_rows() == 600


def test_the_split_of_a_stored_data_set_is_chosen_by_name(tmp_path: Path) -> None:
    where = str(tmp_path / "set")
    parts = {"train": chats(5), "test": chats(2)}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    ).save_to_disk(where)
    assert read(DatasetSource(where, "test", "", ANY)) == chats(2)
    with pytest.raises(DataError, match="has no split validation: choose of train, test"):
        DatasetSource(where, "validation", "", ANY)


def test_another_split_of_a_data_set_that_is_one_split_is_refused(tmp_path: Path) -> None:
    where = str(tmp_path / "set")
    datasets.Dataset.from_list(chats(3), split="test").save_to_disk(where)
    assert read(DatasetSource(where, "test", "", ANY)) == chats(3)
    assert read(DatasetSource(where, "train", "", ANY)) == chats(3)
    with pytest.raises(DataError, match="is one split, not several: drop --split validation"):
        DatasetSource(where, "validation", "", ANY)


def test_rows_that_datasets_keeps_as_json_are_read_as_they_were(tmp_path: Path) -> None:
    rows = chats(2)
    rows[1]["messages"][0]["content"] = [{"type": "text", "text": "x"}]
    rows[1]["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": None}}}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    data.save_to_disk(str(tmp_path / "set"))
    assert read(DatasetSource(str(tmp_path / "set"), "train", "", ANY)) == rows


def test_a_directory_that_is_no_data_set_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot be loaded as a data set") as caught:
        DatasetSource(str(tmp_path), "train", "", ANY)
    assert "\n" not in str(caught.value)


def test_a_text_that_is_no_utf8_rejects_its_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"\xff\xfe", b"three"])
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    table = pa.table({"prompt": texts, "completion": ["a", "b", "c"]})
    rows = read(ParquetSource(parquet(tmp_path / "a.parquet", table)))
    assert rows[0] == {"prompt": "one", "completion": "a"}
    assert rows[2] == {"prompt": "three", "completion": "c"}
    assert isinstance(rows[1], Rejected)
    assert rows[1].reason == "not_utf8"


def test_a_hub_data_set_is_asked_for_with_its_split_and_subset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def load(*words: Any, **more: Any) -> datasets.Dataset:
        asked.append((words, more))
        return datasets.Dataset.from_list(chats(3))

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = DatasetSource("some-one/chats", "test", "small", ANY)
    assert asked == [(("some-one/chats", "small"), {"split": "test"})]
    assert read(source) == chats(3)
    assert source.name == "some-one/chats"


def test_a_hub_data_set_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("no such\nthing")

    monkeypatch.setattr(datasets, "load_dataset", load)
    message = (
        r"--input some/one cannot be loaded as a data set \(FileNotFoundError: no such thing\)"
    )
    with pytest.raises(DataError, match=message):
        DatasetSource("some/one", "train", "", ANY)
