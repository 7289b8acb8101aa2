"""`ds-sft inspect` shows packs and documents, what of them is trained, and where a text is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_sft.data import inspect
from ds_sft.data.inspect import InspectFlags
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.tokenizer import load_backend
from ds_sft.errors import ConfigError, DataError

TINY = Path(__file__).parents[1] / "golden" / "tiny_tokenizer"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    backend = load_backend(TINY / "tokenizer.json")
    out = tmp_path / "data"
    with PackedWriter(out, max_seq_len=40) as writer:
        shutil.copytree(TINY, writer.tokenizer_dir)
        ids = backend.encode("ask: [x]<|im_end|>\nyes é<|im_end|>\n", add_special_tokens=False).ids
        mask = np.zeros(len(ids), np.uint8)
        mask[10:] = 1
        writer.add_pack(np.array(ids * 2), np.concatenate([mask, mask * 0]), [len(ids)] * 2)
        writer.commit({})
    return out


def test_trained_text_stands_in_brackets(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect.run(InspectFlags(data=data))
    said = capsys.readouterr().out
    assert "ask: [x]<|im_end|>\n[yes é<|im_end|>\n]" in said
    assert "document 1 of 2: 18 tokens, 8 trained (44%)" in said
    assert "document 2 of 2: 18 tokens, 0 trained (0%)" in said
    assert "pack 0 of 1" in said
    assert "36 of 40 tokens used (90.0%), 8 trained targets" in said
    assert said.rstrip().endswith("4 tokens")


def test_ids_need_no_tokenizer(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(data / "tokenizer")
    with pytest.raises(DataError, match="holds no tokenizer to show text with: add --ids"):
        inspect.run(InspectFlags(data=data))
    inspect.run(InspectFlags(data=data, ids=True))
    assert "256 198 [" in capsys.readouterr().out


@pytest.mark.parametrize("pack", [-1, 1, 99])
def test_a_pack_that_is_not_there_is_refused(data: Path, pack: int) -> None:
    with pytest.raises(ConfigError, match=f"--pack {pack}: .* has packs 0 to 0"):
        inspect.run(InspectFlags(data=data, pack=pack))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Three packs of five documents."""
    backend = load_backend(TINY / "tokenizer.json")
    out = tmp_path / "chats"
    texts = [["one apple", "two ärger"], ["three"], ["four apple", "five [x]"]]
    with PackedWriter(out, max_seq_len=40) as writer:
        shutil.copytree(TINY, writer.tokenizer_dir)
        for pack in texts:
            ids = [backend.encode(f"{text}<|im_end|>\n").ids for text in pack]
            flat = np.array([token for document in ids for token in document])
            writer.add_pack(flat, np.ones(len(flat), np.uint8), [len(doc) for doc in ids])
        counts = {"rows": 5, "rejected": 0, "tokens_in": 1000, "tokens_dropped": 7, "tokens_cut": 0}
        writer.commit({"counts": counts, "rejected": {}})
    return out


@pytest.mark.parametrize(
    ("number", "heading", "text"),
    [
        (0, "document 0 (1 of 2 in pack 0)", "[one apple<|im_end|>\n]"),
        (2, "document 2 (1 of 1 in pack 1)", "[three<|im_end|>\n]"),
        (4, "document 4 (2 of 2 in pack 2)", "[five [x]<|im_end|>\n]"),
    ],
)
def test_a_document_is_found_by_its_number_over_all_packs(
    chats: Path, capsys: pytest.CaptureFixture[str], number: int, heading: str, text: str
) -> None:
    inspect.run(InspectFlags(data=chats, document=number))
    said = capsys.readouterr().out
    assert heading in said
    assert text in said
    assert said.count("document") == 1


@pytest.mark.parametrize("number", [-1, 5])
def test_a_document_that_is_not_there_is_refused(chats: Path, number: int) -> None:
    with pytest.raises(ConfigError, match=f"--document {number}: .* has documents 0 to 4"):
        inspect.run(InspectFlags(data=chats, document=number))


@pytest.mark.parametrize(
    ("text", "found"),
    [("apple", [0, 3]), ("ärger", [1]), ("<|im_end|>", [0, 1, 2, 3, 4]), ("[x]", [4]), ("zzz", [])],
)
def test_search_finds_every_document_that_holds_the_text(
    chats: Path, capsys: pytest.CaptureFixture[str], text: str, found: list[int]
) -> None:
    inspect.run(InspectFlags(data=chats, search=text))
    said = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in said if line.startswith("document")] == found
    assert sum(text in line for line in said) == len(found)
    assert said[-1] == f"{len(found)} found in all documents; --document N shows one"


def test_search_does_not_join_documents(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect.run(InspectFlags(data=chats, search="<|im_end|>\ntwo"))
    assert "0 found in all documents" in capsys.readouterr().out


def test_search_is_the_same_for_a_tokenizer_whose_tokens_have_no_bytes_of_their_own(
    chats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect.run(InspectFlags(data=chats, search="ä"))
    by_bytes = capsys.readouterr().out
    monkeypatch.setattr(inspect, "token_bytes", lambda _: None)
    inspect.run(InspectFlags(data=chats, search="ä"))
    assert capsys.readouterr().out == by_bytes


def test_search_stops_at_the_limit_and_says_how_far_it_came(
    chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect.run(InspectFlags(data=chats, search="e", limit=2))
    assert "2 found in the first 2 of 5 documents" in capsys.readouterr().out


def test_tokens_of_another_tokenizer_are_not_searched(chats: Path) -> None:
    tokens = np.load(chats / "tokens.npy")
    tokens[1, 0] = 10**6
    np.save(chats / "tokens.npy", tokens)
    with pytest.raises(DataError, match="pack 1 holds token ids that its tokenizer does not have"):
        inspect.run(InspectFlags(data=chats, search="apple", limit=0))


def test_rejected_rows_are_listed_by_reason_most_frequent_first(
    chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect.run(InspectFlags(data=chats, rejected=True))
    whole = "0 of 5 rows rejected; of 1,000 tokens 7 dropped and 0 cut off\n"
    assert capsys.readouterr().out == whole
    manifest = json.loads((chats / "manifest.json").read_text())
    manifest["rejected"] = {"a_few": 2, "many": 1234}
    manifest["first_rejected"] = {"a_few": "chats.jsonl:3: [/x] " + "long " * 40, "many": "y:1: z"}
    manifest["counts"].update(rows=2000, rejected=1236)
    manifest["dropped_tokens"] = {"overlong": 7}
    (chats / "manifest.json").write_text(json.dumps(manifest))
    inspect.run(InspectFlags(data=chats, rejected=True))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1,236 of 2,000 rows rejected")
    assert said[2].split() == ["1,234", "many", "y:1:", "z"]
    assert said[3].split()[:5] == ["2", "a_few", "chats.jsonl:3:", "[/x]", "long"]
    assert said[5].split() == ["7", "overlong"]
    assert len(said) == 6, "in a pipe every reason has one line"


def test_a_data_set_that_says_nothing_of_rejected_rows_is_refused(data: Path) -> None:
    with pytest.raises(DataError, match="does not say what was rejected"):
        inspect.run(InspectFlags(data=data, rejected=True))


@pytest.mark.parametrize(
    ("name", "text", "view"),
    [
        ("tokenizer/tokenizer.json", "{}", {}),
        ("tokenizer/tokenizer.json", "", {"search": "x"}),
        ("manifest.json", '{"max_seq_len": 200, "counts": {}, "rejected": {}}', {"rejected": True}),
        ("manifest.json", '{"max_seq_len": 200, "counts": 3, "rejected": []}', {"rejected": True}),
    ],
)
def test_a_damaged_file_is_named_in_a_line(
    chats: Path, name: str, text: str, view: dict[str, Any]
) -> None:
    manifest = json.loads((chats / "manifest.json").read_text())
    (chats / name).write_text(text.replace("200", str(manifest["max_seq_len"])))
    with pytest.raises(DataError, match=f"{name} .*run `ds-sft prepare` again"):
        inspect.run(InspectFlags(data=chats, **view))


def test_two_views_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="--document and --search show different things"):
        InspectFlags(data=Path("data"), document=0, search="x")
    with pytest.raises(ConfigError, match="--limit -1"):
        InspectFlags(data=Path("data"), search="x", limit=-1)
