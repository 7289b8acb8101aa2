"""What --input names is found, in a fixed order, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest

from ds_sft.data.inputs import Input, Tables, open_inputs, refuse_unused
from ds_sft.errors import ConfigError, DataError


def opened(text: str) -> Input:
    (found,) = open_inputs([text], Tables())
    return found


def names(text: str) -> list[str]:
    return [Path(source.name).name for source in opened(text).sources]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.json", "c.jsonl.gz", "notes.md", "dataset_info.json", ".d.jsonl"):
        (tmp_path / name).write_bytes(b"{}\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "e.jsonl").write_bytes(b"{}\n")
    return tmp_path


def test_a_file_of_any_name_is_json_lines(folder: Path) -> None:
    assert names(f"{folder}/notes.md") == ["notes.md"]


def test_a_directory_is_the_known_files_in_it_sorted(folder: Path) -> None:
    assert names(str(folder)) == ["a.json", "b.jsonl", "c.jsonl.gz"]


def test_a_pattern_is_what_it_matches_sorted(folder: Path) -> None:
    assert names(f"{folder}/*.jsonl*") == ["b.jsonl", "c.jsonl.gz"]
    assert names(f"{folder}/**/*.jsonl") == ["b.jsonl", "e.jsonl"]


@pytest.mark.parametrize(
    ("amount", "repeats", "fraction"),
    [("", 1, None), (":1", 1, None), (":3", 3, None), (":0.5", 1, 0.5), (":.25", 1, 0.25)],
)
def test_an_amount_repeats_or_draws(
    folder: Path, amount: str, repeats: int, fraction: float | None
) -> None:
    found = opened(f"{folder}/b.jsonl{amount}")
    assert (found.repeats, found.fraction) == (repeats, fraction)
    assert len(found.sources) == 1


def test_a_path_with_a_colon_that_is_there_wins(folder: Path) -> None:
    (folder / "b.jsonl:3").write_bytes(b"{}\n")
    assert opened(f"{folder}/b.jsonl:3").repeats == 1
    assert names(f"{folder}/b.jsonl:3") == ["b.jsonl:3"]
    assert opened(f"{folder}/b.jsonl:3:2").repeats == 2


@pytest.mark.parametrize("amount", ["0", "1001", "0.0", "1.0", "2.5"])
def test_an_amount_that_is_neither_is_refused(folder: Path, amount: str) -> None:
    with pytest.raises(ConfigError, match=rf"--input .*b\.jsonl:{amount}: "):
        opened(f"{folder}/b.jsonl:{amount}")


@pytest.mark.parametrize("text", ["", ":3", ":0.5"])
def test_nothing_is_not_the_current_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=f"--input '{text}' names no file"):
        opened(text)
    assert names(".") == ["a.json", "b.jsonl", "c.jsonl.gz"]
    assert opened(".:3").repeats == 3


def test_a_split_that_no_input_has_is_refused(folder: Path) -> None:
    file = str(folder / "b.jsonl")
    datasets.Dataset.from_list([{"a": 1}], split="test").save_to_disk(folder / "set")
    for how in (Tables(split="nope"), Tables(subset="x")):
        with pytest.raises(ConfigError, match=r"--(split nope|subset x): no input is a data set"):
            refuse_unused(how, open_inputs([file], how))
    test = Tables(split="test")
    both = open_inputs([file, str(folder / "set")], test)
    refuse_unused(test, both)
    refuse_unused(Tables(), open_inputs([file], Tables()))
    with pytest.raises(ConfigError, match="--subset x: no input is a data set on the Hub"):
        refuse_unused(Tables(subset="x"), both)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.jsonl", r"--input nowhere\.jsonl is not a file"),
        ("./nowhere/data", "is not a file"),
        ("{}/*.csv", "matches no file"),
        ("{}/more/none*", "matches no file"),
    ],
)
def test_what_is_not_there_is_refused_by_name(folder: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(text.format(folder))


def test_a_directory_without_known_files_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds none of \.jsonl, .*\*\*/\*\.jsonl"):
        opened(str(tmp_path))


def test_a_packed_data_set_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "pack_offsets.npy").write_bytes(b"")
    with pytest.raises(DataError, match="is a packed data set already"):
        opened(str(tmp_path))


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe is a pipe or a device, .*: write the rows to a"):
        opened(str(tmp_path / "pipe"))


def test_a_path_that_cannot_be_looked_at_is_one_line() -> None:
    with pytest.raises(DataError, match=r"--input x+ cannot be read: File name too long"):
        opened("x" * 5000)
