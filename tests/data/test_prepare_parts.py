"""`prepare` from end to end on mixed inputs: draws, the validation part, duplicates, statistics."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from preparing import TINY, asks, chat, prepared, run, texts, write

from ds_sft.data import chunks, pipeline, prepare
from ds_sft.data.packed import VALIDATION_DIR, PackedDataset
from ds_sft.data.prepare_flags import PrepareFlags
from ds_sft.data.template import read_template
from ds_sft.errors import ConfigError, DataError
from ds_sft.flags import parse_flags
from ds_sft.run.verify import verify

SHAREGPT = {
    "conversations": [{"from": "human", "value": "s"}, {"from": "gpt", "value": "share"}],
}
ALPACA = {"instruction": "al", "input": "in", "output": "alpaca"}


def numbered(number: int) -> list[dict[str, Any]]:
    return [chat(f"a{place}", "b") for place in range(number)]


def test_files_of_every_kind_give_the_same_documents(tmp_path: Path) -> None:
    rows = [chat("a", "bb"), chat("c", "dd"), chat("e", "ff")]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    contents = {
        "1.jsonl": lines,
        "2.jsonl.gz": gzip.compress(lines),
        "3.jsonl.zst": zstandard.compress(lines),
        "4.json": json.dumps(rows, indent=2).encode(),
    }
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(rows), folder / "5.parquet")
    one = texts(prepared(tmp_path / "one", folder / "1.jsonl"))
    data = prepared(tmp_path / "all", folder)
    assert texts(data) == one * 5
    assert [Path(source["path"]).name for source in data.manifest["sources"]] == [
        *contents,
        "5.parquet",
    ]
    assert all(len(source["sha256"]) == 64 for source in data.manifest["sources"])


def test_shapes_are_recognised_row_by_row_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run(tmp_path, [chat("a", "b"), SHAREGPT, ALPACA, chat("c", "d")])
    assert data.manifest["shapes"] == {"messages": 2, "sharegpt": 1, "alpaca": 1}
    assert asks(data) == ["a", "s", "al\n\nin", "c"]
    assert "shapes       messages 2, alpaca 1, sharegpt 1" in capsys.readouterr().out


def test_when_no_row_is_usable_the_shapes_seen_and_accepted_are_named(tmp_path: Path) -> None:
    rows = [{"text": "x"}, {"text": "y"}, {"messages": []}, b"{"]
    with pytest.raises(DataError) as caught:
        run(tmp_path, rows, max_rejected=1.0)
    message = str(caught.value)
    assert "unknown_shape: 2 (first" in message
    assert "shapes seen: unknown 2, messages 1, unreadable 1" in message
    assert "accepted: messages, typed-parts, sharegpt, alpaca, prompt-completion, eliza" in message


def test_a_forced_format_rejects_the_other_shapes(tmp_path: Path) -> None:
    data = run(tmp_path, [SHAREGPT, chat("a", "b")], format="sharegpt", max_rejected=0.5)
    assert asks(data) == ["s"]
    assert data.manifest["shapes"] == {"sharegpt": 2}
    assert list(data.manifest["first_rejected"]) == ["messages_not_a_list"]
    assert data.manifest["first_rejected"]["messages_not_a_list"].startswith(
        f"{tmp_path / 'chats.jsonl'}:2: "
    )


def test_inputs_are_repeated_and_drawn(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.jsonl", numbered(10)), write(tmp_path / "2.jsonl", [ALPACA])
    data = prepared(tmp_path / "data", (f"{one}:0.3",), (f"{two}:3", str(two)))
    assert Counter(asks(data)) == {"al\n\nin": 4, **dict.fromkeys(asks(data)[:3], 1)}
    first, second, third = data.manifest["sources"]
    assert first["rows_taken"] == 3
    assert second["repeats"] == 3
    assert "repeats" not in third


def test_duplicates_are_counted_and_dropped_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat("a", "b"), chat("c", "d"), chat("a", "b"), {**chat("a", "b"), "id": 7}]
    kept = run(tmp_path, rows)
    assert kept.manifest["counts"]["duplicates"] == 2
    assert "--drop-duplicates drops them" in capsys.readouterr().out
    data = run(tmp_path, rows, drop_duplicates=True, force=True)
    counts = data.manifest["counts"]
    assert asks(data) == ["a", "c"]
    assert (counts["rows"], counts["documents"], counts["duplicates"]) == (4, 2, 2)
    assert data.manifest["dropped_tokens"] == {"duplicate": counts["tokens"]}
    assert counts["tokens_in"] == 2 * counts["tokens"]


def test_a_repeat_is_no_duplicate(tmp_path: Path) -> None:
    path = write(tmp_path / "1.jsonl", [chat("a", "b"), chat("a", "b"), chat("c", "d")])
    data = prepared(tmp_path / "data", f"{path}:2", drop_duplicates=True)
    assert asks(data) == ["a", "c", "a", "c"]


def test_rows_over_max_chars_are_rejected_and_no_fault(tmp_path: Path) -> None:
    data = run(tmp_path, [chat("a", "b"), chat("c", "d" * 50)], max_chars=30)
    assert data.manifest["rejected"] == {"over_max_chars": 1}
    with pytest.raises(DataError, match=r"no usable row among 2 .*over_max_chars: 2") as caught:
        run(tmp_path, [chat("a", "b"), chat("c", "d" * 50)], max_chars=5, force=True)
    assert caught.value.exit_code == 2


def test_a_fraction_becomes_a_data_set_of_its_own_inside(tmp_path: Path) -> None:
    data = run(tmp_path, numbered(40), validation_fraction=0.2)
    part = PackedDataset.open(data.path / VALIDATION_DIR)
    assert len(asks(part)) == 8
    assert sorted(asks(part) + asks(data)) == sorted(f"a{place}" for place in range(40))
    assert data.manifest["validation"] == part.manifest["counts"]
    assert data.manifest["validation_sha256"] == part.manifest_sha256
    assert data.manifest["counts"]["rows"] == 32
    assert part.manifest["tokenizer_hash"] == data.manifest["tokenizer_hash"]
    assert part.tokenizer_dir is not None
    assert data.manifest["sources"][0]["rows_taken"] == 32
    lines = verify(data.path)
    assert f"validation: packed data set: {part.num_packs} packs of 64 tokens" in lines


def test_files_of_their_own_may_be_the_validation_part(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [chat("v", "w")] * 30)
    data = run(tmp_path, numbered(50), validation_input=((str(held),),), max_samples=40)
    part = PackedDataset.open(data.path / VALIDATION_DIR)
    assert len(asks(data)) == 40
    assert asks(part) == ["v"] * 4
    assert part.manifest["sources"][0]["path"] == str(held)


def test_dropping_duplicates_keeps_validation_rows_out_of_training(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [chat("a1", "b")])
    given: dict[str, Any] = {"validation_input": ((str(held),),)}
    data = run(tmp_path, numbered(3), drop_duplicates=True, **given)
    assert asks(data) == ["a0", "a2"]
    assert asks(PackedDataset.open(data.path / VALIDATION_DIR)) == ["a1"]


def test_validation_rows_that_are_trained_are_a_warning_and_in_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "1.jsonl", numbered(8))
    given: dict[str, Any] = {"validation_input": ((str(path),),)}
    data = prepared(tmp_path / "leak", path, path, **given)
    assert data.manifest["validation_rows_trained"] == 8
    said = capsys.readouterr().out
    assert "warning: 8 validation rows are also trained: --drop-duplicates leaves them out" in said
    fraction = prepared(tmp_path / "twice", path, path, validation_fraction=0.25)
    assert fraction.manifest["validation_rows_trained"] == 0
    assert "also trained" not in capsys.readouterr().out
    held = asks(PackedDataset.open(fraction.path / VALIDATION_DIR))
    assert len(held) == 2
    assert not set(held) & set(asks(fraction))


def test_bad_rows_are_judged_over_both_parts_together(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [chat("v", "w"), {"text": "x"}])
    given: dict[str, Any] = {"validation_input": ((str(held),),)}
    data = run(tmp_path, numbered(48), max_rejected=0.02, **given)
    assert PackedDataset.open(data.path / VALIDATION_DIR).manifest["rejected"]
    with pytest.raises(DataError, match=r"^1 of 49 rows \(2\.0%\) cannot .*held\.jsonl:2: "):
        run(tmp_path, numbered(47), max_rejected=0.02, out=tmp_path / "other", **given)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["chats.jsonl", "data", "held.jsonl"]


def test_samples_that_multiply_the_tokens_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"chat_template": "qwen3", "max_seq_len": 4096}
    turns = {"messages": MANY_TURNS[0]["messages"] * 20}
    data = run(tmp_path, [turns, chat("a", "b")], history="split", **given)
    said = capsys.readouterr().out
    whole = run(tmp_path, [turns, chat("a", "b")], force=True, **given)
    assert "samples  " not in capsys.readouterr().out
    factor = data.manifest["counts"]["tokens"] / whole.manifest["counts"]["tokens"]
    assert factor > 10
    assert f"1 rows became {len(data.doc_lens) - 1} documents" in said
    assert f"{factor:.0f}" in said.split("split): ")[1].split(" times")[0]
    assert "--train-on last-assistant" in said
    assert "--history levanter" in said


def test_weight_0_is_honoured_with_the_recipes_template(tmp_path: Path) -> None:
    first, second = chat("a", "b")["messages"], chat("c", "d")["messages"]
    row = {"messages": [*first, second[0], {**second[1], "loss_weight": 0}]}
    (text,) = texts(run(tmp_path, [row], chat_template="qwen3", max_seq_len=256))
    assert "[b<|im_end|>\n]" in text
    assert text.count("[") == 1


def test_a_validation_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match="no usable row among 1 of the validation part"):
        run(tmp_path, numbered(3), validation_input=((str(held),),))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "held.jsonl"]


def test_verify_refuses_a_validation_part_of_another_data_set(tmp_path: Path) -> None:
    data = run(tmp_path, numbered(40), validation_fraction=0.2)
    held = data.path / VALIDATION_DIR
    tokens = held / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match="tokens"):
        verify(data.path)
    shutil.rmtree(held)
    with pytest.raises(DataError, match="validation is not a directory"):
        verify(data.path)
    other = prepared(tmp_path / "other", write(tmp_path / "9.jsonl", numbered(9)))
    shutil.copytree(other.path, held)
    with pytest.raises(DataError, match="is not the validation part that"):
        verify(data.path)


def test_statistics_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "1.jsonl", numbered(20))
    data = prepared(tmp_path / "data", path)
    capsys.readouterr()
    words = ["--input", str(path), "--tokenizer", str(TINY), "--max-seq-len", "64", "--stats-only"]
    prepare.run(parse_flags(PrepareFlags, words, "ds-sft prepare"))
    said = capsys.readouterr().out
    assert "tokens of a document" in said
    assert f"{data.manifest['counts']['tokens']:,}" in said
    assert f"fill {data.manifest['packing']['fill']:.1%}" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.jsonl", "data"]


def mixed(folder: Path) -> list[str]:
    """Inputs of several kinds, with rows of every fate."""
    folder.mkdir()
    rows: list[Any] = [
        b"broken" if place % 97 == 5 else chat(f"q{place % 300}", "é" * (place % 50))
        for place in range(700)
    ]
    one = write(folder / "1.jsonl", rows)
    usable = [row for row in rows if isinstance(row, dict)]
    (folder / "2.json").write_text(json.dumps(usable[:300]))
    pq.write_table(pa.Table.from_pylist(usable), folder / "3.parquet", row_group_size=150)
    return [f"{one}:2", f"{folder}/2.json", f"{folder}/3.parquet:0.5"]


@pytest.mark.parametrize(
    ("workers", "start", "packing"),
    [
        (2, "fork", "next-fit"),
        pytest.param(3, "spawn", "best-fit", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_workers_writes_the_same_bytes_of_mixed_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, start: str, packing: str
) -> None:
    inputs = mixed(tmp_path / "in")
    given: dict[str, Any] = {
        "overlong": "split",
        "packing": packing,
        "drop_duplicates": True,
        "validation_fraction": 0.05,
        "max_samples": 1500,
        "max_rejected": 0.5,
    }
    alone = prepared(tmp_path / "alone", *inputs, **given)
    monkeypatch.setattr(pipeline, "start_method", lambda: start)
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 16)
    monkeypatch.setattr(pipeline, "SMALL_INPUT_BYTES", 0)
    together = prepared(tmp_path / "together", *inputs, **given, workers=workers)
    assert together.num_packs > 20
    assert together.manifest_sha256 == alone.manifest_sha256
    held = [PackedDataset.open(data.path / VALIDATION_DIR) for data in (alone, together)]
    assert held[0].manifest_sha256 == held[1].manifest_sha256


@pytest.mark.parametrize("overlong", ["left", "right", "drop", "split"])
def test_every_token_is_accounted_for(tmp_path: Path, overlong: str) -> None:
    rows = [chat("q" * (place % 90), "a" * (place * 7 % 200)) for place in range(60)]
    data = run(tmp_path, rows, overlong=overlong)
    facts = data.manifest
    counts = facts["counts"]
    whole = run(tmp_path, rows, max_seq_len=4096, force=True).manifest["counts"]["tokens"]
    assert counts["tokens_in"] == whole
    assert counts["tokens"] + counts["tokens_cut"] + counts["tokens_dropped"] == whole
    assert counts["tokens_dropped"] == sum(facts["dropped_tokens"].values())
    assert counts["tokens"] == int(data.doc_lens.sum())


def test_a_token_that_is_lost_is_a_bug_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "pieces", lambda length, *_: [slice(0, 60), slice(61, length)])
    with pytest.raises(RuntimeError, match="tokens came in and"):
        run(tmp_path, [chat("a", "b" * 100)], overlong="split", max_seq_len=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]


def test_inputs_may_follow_one_flag_or_several() -> None:
    words = ["--input", "a", "b:2", "--input", "c", "--tokenizer", "t", "--out", "o"]
    flags = parse_flags(PrepareFlags, words, "ds-sft prepare")
    assert flags.inputs == ["a", "b:2", "c"]
    assert flags.validation_inputs == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": None}, "--out is missing"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"validation_fraction": 0.1, "validation_input": (("a",),)}, "exclude each other"),
        ({"chat_template": "qwen3", "chat_template_from": "x"}, "exclude each other"),
        ({"max_samples": -1}, "--max-samples -1"),
        ({"max_chars": -1}, "--max-chars -1"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"input": (("a",),), "tokenizer": "t", "out": Path("o")}
    with pytest.raises(ConfigError, match=message):
        prepare.PrepareFlags(**{**given, **changes})


def test_a_tokenizer_without_a_template_takes_anothers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    (base / "chat_template.jinja").unlink()
    given: dict[str, Any] = {"tokenizer": str(base)}
    data = run(tmp_path, numbered(3), **given, chat_template_from=str(TINY))
    assert texts(data) == texts(run(tmp_path, numbered(3), force=True))
    assert data.manifest["chat_template_from"] == str(TINY)
    assert f"chat template: that of {TINY}" in capsys.readouterr().out
    with pytest.raises(DataError, match="has no chat template, and none of"):
        run(tmp_path, numbered(3), **given, force=True)


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("assistant", ["b", "d"]), ("last-assistant", ["d"]), ("all", ["a", "b", "c", "d"])],
)
def test_the_flags_of_the_mask_reach_the_workers(
    tmp_path: Path, train_on: str, trained: list[str]
) -> None:
    row = {"messages": chat("a", "b")["messages"] + chat("c", "d")["messages"]}
    data = run(tmp_path, [row], train_on=train_on)
    (text,) = texts(data)
    inside = "".join(piece.partition("]")[0] for piece in text.split("[")[1:])
    words = [word for word in ("a", "b", "c", "d") if f"\n{word}<" in f"\n{inside}"]
    assert words == trained
    assert data.manifest["masks"]["train_on"] == train_on


def test_a_turn_with_weight_0_is_not_trained(tmp_path: Path) -> None:
    first, second = chat("a", "b")["messages"], chat("c", "d")["messages"]
    row = {"messages": [first[0], {**first[1], "loss_weight": 0}, *second]}
    (text,) = texts(run(tmp_path, [row]))
    assert "assistant\nb<|im_end|>" in text
    assert "[d<|im_end|>\n]" in text


THOUGHT = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
MANY_TURNS = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            THOUGHT,
            {"role": "user", "content": "b"},
            THOUGHT,
        ]
    }
]


@pytest.mark.parametrize(
    ("flags", "kind", "documents"),
    [
        ({"chat_template": "qwen3"}, "levanter", 1),
        ({"chat_template": "qwen3", "history": "split"}, "split", 2),
    ],
)
def test_the_recipes_template_makes_one_sample_as_levanter_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict, kind: str, documents: int
) -> None:
    data = run(tmp_path, MANY_TURNS, max_seq_len=512, **flags)
    assert len(data.doc_lens) == documents
    assert data.manifest["masks"]["history"] == kind
    assert ("history      levanter, since" in capsys.readouterr().out) == (kind == "levanter")


def test_another_template_splits_what_it_rewrites(tmp_path: Path) -> None:
    """The same template in a file is no recipe's."""
    (tmp_path / "mine.jinja").write_text(read_template("qwen3"))
    mine = str(tmp_path / "mine.jinja")
    data = run(tmp_path, MANY_TURNS, max_seq_len=512, chat_template=mine)
    assert data.manifest["masks"]["history"] == "split"
    assert len(data.doc_lens) == 2
