"""`ds-sft prepare`: every row is packed, dropped or rejected, and counted; nothing half is left."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from preparing import TINY, chat, run, texts, write

from ds_sft.data import chunks, pipeline
from ds_sft.data.collate import IGNORE, collate
from ds_sft.data.packed import ARRAY_DTYPES, PackedDataset, check_hashes
from ds_sft.data.tokenizer import load_backend, load_tokenizer, tokenizer_hash
from ds_sft.errors import ConfigError, DataError


def test_documents_are_packed_in_order_and_their_answers_trained(tmp_path: Path) -> None:
    data = run(tmp_path, [chat("a", "bb"), chat("c", "dd"), chat("e", "ff")])
    assert texts(data) == [
        f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n[{reply}<|im_end|>\n]"
        for ask, reply in (("a", "bb"), ("c", "dd"), ("e", "ff"))
    ]
    assert data.num_packs == 2
    batch = collate(data, [0, 1], num_active=2)
    assert (batch.targets != IGNORE).sum() == data.assistant_counts.sum() == 3 * 4


def test_the_manifest_says_where_everything_comes_from(tmp_path: Path) -> None:
    data = run(tmp_path, [chat("a", "b"), chat("c", "d")], chat_template="qwen3")
    facts = data.manifest
    raw = (tmp_path / "chats.jsonl").read_bytes()
    assert facts["format_version"] == 1
    assert facts["sources"] == [
        {
            "path": str(tmp_path / "chats.jsonl"),
            "bytes": len(raw),
            "lines": 2,
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
    ]
    assert facts["tokenizer_hash"] == tokenizer_hash(TINY)
    assert data.tokenizer_dir is not None
    stored = (data.tokenizer_dir / "chat_template.jinja").read_bytes()
    assert facts["chat_template_sha256"] == hashlib.sha256(stored).hexdigest()
    assert facts["chat_template"] == "qwen3"
    assert facts["mask_from"] == "marks"
    assert facts["packing"]["kind"] == "next-fit"
    assert facts["packing"]["fill"] == facts["counts"]["tokens"] / (64 * data.num_packs)
    assert facts["counts"]["trained_tokens"] == int(data.assistant_mask.sum())
    assert facts["counts"]["tokens"] == int(data.doc_lens.sum())
    arrays = [f"{name}.npy" for name in ARRAY_DTYPES]
    stored = [f"tokenizer/{path.name}" for path in (data.path / "tokenizer").iterdir()]
    assert sorted(check_hashes(data)) == sorted([*arrays, *stored])


def test_the_stored_tokenizer_renders_what_was_trained(tmp_path: Path) -> None:
    row = chat("a", "b")
    data = run(tmp_path, [row], chat_template="qwen3")
    tokenizer = load_tokenizer(str(data.tokenizer_dir))
    ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
    assert data.tokens[0, : len(ids)].tolist() == ids
    marked = tokenizer.apply_chat_template(
        row["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    assert data.assistant_mask[0, : len(ids)].tolist() == marked["assistant_masks"]


def test_preparing_from_the_stored_tokenizer_gives_the_same_arrays(tmp_path: Path) -> None:
    rows = [chat("a", "b"), chat("c", "d")]
    first = run(tmp_path, rows, chat_template="qwen3")
    again = run(tmp_path, rows, tokenizer=str(first.tokenizer_dir), out=tmp_path / "again")
    assert again.manifest_sha256 != ""
    second = PackedDataset.open(tmp_path / "again")
    assert second.manifest["sha256"] == first.manifest["sha256"]
    assert second.manifest["tokenizer_hash"] == first.manifest["tokenizer_hash"]


BAD = [
    (b"{not json", "not_json"),
    (b'"\xff"', "not_utf8"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no_assistant_turn"),
    ({"messages": 7}, "messages_not_a_list"),
    ({"text": "x"}, "unknown_shape"),
]


def test_bad_rows_are_counted_by_reason_and_the_good_ones_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat("a", "b"), *(row for row, _ in BAD), BAD[0][0], chat("c", "d")]
    data = run(tmp_path, rows, max_rejected=0.9)
    assert data.manifest["rejected"] == {**{reason: 1 for _, reason in BAD}, "not_json": 2}
    assert data.manifest["counts"]["rows"] == 8
    assert data.manifest["counts"]["documents"] == 2
    said = capsys.readouterr().out
    assert "8 in, 2 accepted, 6 rejected" in said
    assert f"not_json: 2 (first {tmp_path / 'chats.jsonl'}:2: " in said


def test_text_of_rows_and_names_is_printed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a:100:b[red].jsonl", [chat("a", "b"), {"text": ":smile:"}])
    run(tmp_path, [], input=(path,), max_rejected=0.5)
    assert f"(first {path}:2: " in capsys.readouterr().out


@pytest.mark.parametrize(("row", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_too_many_bad_rows_are_refused_with_reason_file_and_line(
    tmp_path: Path, row: Any, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path, [chat("a", "b"), row])
    message = str(caught.value)
    assert "1 of 2 rows (50.0%) cannot be used, more than --max-rejected 0.01" in message
    assert f"{reason}: 1 (first {tmp_path / 'chats.jsonl'}:2: " in message
    assert "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]


def test_no_usable_row_is_an_error_even_if_all_may_be_rejected(tmp_path: Path) -> None:
    template = tmp_path / "narrow.jinja"
    text = (TINY / "chat_template.jinja").read_text()
    refuse = "{% if messages|length > 2 %}{{ raise_exception('too long a talk') }}{% endif %}"
    template.write_text(refuse + text)
    row = {"messages": chat("a", "b")["messages"] * 2}
    with pytest.raises(
        DataError,
        match=r"no usable row among 1 of .*too long a talk.*the chat template is .*narrow",
    ):
        run(tmp_path, [row], max_rejected=1.0, chat_template=str(template))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"empty\.jsonl holds no row"):
        run(tmp_path, [chat("a", "b")], input=(path,))


def document_length(ask: str, reply: str) -> int:
    backend = load_backend(TINY / "tokenizer.json")
    text = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"
    return len(backend.encode(text, add_special_tokens=False).ids)


def test_an_overlong_document_keeps_its_first_tokens_by_default(tmp_path: Path) -> None:
    long = document_length("a", "x" * 100)
    data = run(tmp_path, [chat("a", "b"), chat("a", "x" * 100), chat("c", "d")])
    counts = data.manifest["counts"]
    assert [data.doc_lengths(pack) for pack in range(3)] == [[23], [64], [23]]
    assert counts["cut_documents"] == 1
    assert counts["tokens_cut"] == long - 64
    assert counts["tokens_in"] == counts["tokens"] + counts["tokens_cut"]
    assert texts(data)[1].startswith("<|im_start|>user\na")


def test_right_keeps_the_last_tokens(tmp_path: Path) -> None:
    data = run(tmp_path, [chat("a" * 100, "b")], overlong="right")
    assert data.doc_lengths(0) == [64]
    assert texts(data)[0].endswith("aa<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>\n]")


def test_drop_counts_what_it_drops_and_ends_the_pack(tmp_path: Path) -> None:
    long = document_length("a", "x" * 100)
    data = run(tmp_path, [chat("a", "b"), chat("a", "x" * 100), chat("c", "d")], overlong="drop")
    counts = data.manifest["counts"]
    assert [data.doc_lengths(pack) for pack in range(2)] == [[23], [23]]
    assert counts["dropped_documents"] == 1
    assert counts["tokens_dropped"] == long
    assert counts["tokens_in"] == counts["tokens"] + long


@pytest.mark.parametrize("overlong", ["right", "split"])
def test_the_first_token_of_a_cut_document_is_no_target_and_not_counted_as_one(
    tmp_path: Path, overlong: str
) -> None:
    data = run(tmp_path, [chat("a", "b" * 200)], overlong=overlong)
    assert data.manifest["counts"]["trained_tokens"] == int(data.assistant_counts.sum())


def test_raise_names_file_line_and_length(tmp_path: Path) -> None:
    long = document_length("a", "x" * 100)
    with pytest.raises(DataError, match=rf"chats\.jsonl:2 has {long} tokens, more than .* 64: "):
        run(tmp_path, [chat("a", "b"), chat("a", "x" * 100)], overlong="raise")


@pytest.mark.parametrize("overlong", ["left", "drop"])
def test_where_everything_is_too_long_the_error_names_the_way_out(
    tmp_path: Path, overlong: str
) -> None:
    with pytest.raises(DataError, match=r"no usable row.*raise --max-seq-len, or choose another"):
        run(tmp_path, [chat("a" * 100, "b")], overlong=overlong)


def test_a_document_whose_answer_is_cut_away_is_dropped_under_its_own_reason(
    tmp_path: Path,
) -> None:
    data = run(tmp_path, [chat("a", "b"), chat("a" * 100, "b")])
    long = document_length("a" * 100, "b")
    assert data.manifest["rejected"] == {}
    assert data.manifest["dropped_tokens"] == {"no_trained_token_after_cut": long}
    counts = data.manifest["counts"]
    assert counts["tokens_in"] == counts["tokens"] + counts["tokens_dropped"]
    assert data.num_packs == 1


def test_max_docs_per_pack_is_obeyed(tmp_path: Path) -> None:
    data = run(tmp_path, [chat("a", "b")] * 5, max_seq_len=1000, max_docs_per_pack=2)
    assert [len(data.doc_lengths(pack)) for pack in range(data.num_packs)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("packing", "advice"),
    [
        ("next-fit", "change --max-seq-len or --max-docs-per-pack, or choose --packing best-fit"),
        ("best-fit", "change --max-seq-len\n"),
        ("none", "choose --packing next-fit or best-fit, or change --max-seq-len"),
    ],
)
def test_a_low_fill_is_a_warning_that_names_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str, advice: str
) -> None:
    run(tmp_path, [chat("a", "b")], max_seq_len=1000, packing=packing)
    said = capsys.readouterr().out
    assert "fill 2.3%" in said
    assert f"(documents have 23 tokens on average): {advice}" in said


def test_a_template_that_does_not_train_the_stop_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (TINY / "chat_template.jinja").read_text()
    stop = " + '<|im_end|>\\n' }}{% endgeneration %}"
    path = tmp_path / "no_stop.jinja"
    path.write_text(text.replace(stop, " }}{% endgeneration %}{{ '<|im_end|>\\n' }}"))
    assert path.read_text() != text
    run(tmp_path, [chat("a", "b")], chat_template=str(path))
    assert "leaves the stop token outside its marks" in capsys.readouterr().out


def many(number: int) -> list[Any]:
    words = ["alpha", "beta", "gamma", "délta", "中文"]
    rows: list[Any] = []
    for i in range(number):
        ask, reply = f"{words[i % 5]} {i}?", " ".join(words[: i % 6]) * (i % 7)
        rows.append(b"broken" if i % 97 == 5 else chat(ask, reply))
    return rows


@pytest.mark.parametrize(("workers", "start"), [(2, "fork"), (2, "spawn"), (3, "spawn")])
def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, start: str
) -> None:
    monkeypatch.setattr(pipeline, "start_method", lambda: start)
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 16)
    rows = many(700)
    alone = run(tmp_path, rows, max_rejected=0.1, max_seq_len=256)
    monkeypatch.setattr(pipeline, "SMALL_INPUT_BYTES", 0)
    out = tmp_path / "many"
    run(tmp_path, rows, max_rejected=0.1, max_seq_len=256, workers=workers, out=out)
    together = PackedDataset.open(out)
    assert together.num_packs > 20
    assert together.manifest_sha256 == alone.manifest_sha256
    assert texts(together) == texts(alone)


def command(tmp_path: Path, *more: str) -> list[str]:
    code = "from ds_sft.data import chunks, pipeline; pipeline.SMALL_INPUT_BYTES = 0;"
    code += "import sys; from pathlib import Path; from ds_sft.data import prepare;"
    code += "a = sys.argv; prepare.run(prepare.PrepareFlags(input=(Path(a[1]),), tokenizer=a[2],"
    code += " out=Path(a[3]), max_seq_len=256, workers=2, max_rejected=0.1))"
    chats = str(tmp_path / "chats.jsonl")
    return [sys.executable, "-c", code, chats, str(TINY), str(tmp_path / "data"), *more]


def test_a_kill_leaves_no_data_set_and_no_worker(tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", many(60_000))
    partial = tmp_path / "data.partial" / "tokens.npy"
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (partial.exists() and partial.stat().st_size > 1000):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    assert not (tmp_path / "data").exists()
    while any(_runs(int(child)) for child in children):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
    data = run(tmp_path, many(50), max_rejected=0.1, max_seq_len=256)
    assert data.num_packs > 0
    assert not partial.parent.exists()


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ds_sft.data.packed_writer._fsync", full)
    with pytest.raises(DataError, match=r"data cannot be written .*No space left on device"):
        run(tmp_path, [chat("a", "b")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]


def test_a_real_full_disk_stops_the_arrays(tmp_path: Path) -> None:
    # A file size limit is the full disk that every machine has.
    write(tmp_path / "chats.jsonl", [chat("a", "b")] * 3000)
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000));"
    words = command(tmp_path)
    words[2] = limited + words[2].replace("SMALL_INPUT_BYTES = 0", "SMALL_INPUT_BYTES = 1 << 40")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DataError" in done.stderr.splitlines()[-1]
    assert "File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]


def test_an_existing_out_is_refused_before_any_work(tmp_path: Path) -> None:
    data = run(tmp_path, [chat("a", "b")])
    with pytest.raises(DataError, match="exists: choose another --out, or add --force"):
        run(tmp_path, [chat("c", "d")], tokenizer="/nowhere")
    assert PackedDataset.open(data.path).manifest_sha256 == data.manifest_sha256
    run(tmp_path, [chat("c", "d")], force=True)
    assert PackedDataset.open(data.path).manifest_sha256 != data.manifest_sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": (Path("nowhere.jsonl"),)}, r"--input nowhere\.jsonl is not a file"),
        ({"input": (TINY.parents[1] / "data",)}, "is not a file, and the directory holds none of"),
        ({"tokenizer": "./nowhere"}, r"--tokenizer \./nowhere is not a directory"),
        ({"chat_template": "nowhere.jinja"}, r"nowhere\.jinja: No such file"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(tmp_path, [chat("a", "b")], **changes)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": ()}, "names no file"),
        ({"max_seq_len": 1}, "--max-seq-len 1"),
        ({"max_docs_per_pack": -1}, "--max-docs-per-pack -1"),
        ({"max_docs_per_pack": 8, "packing": "best-fit"}, "is a limit of next-fit"),
        ({"max_rejected": 1.5}, r"--max-rejected 1\.5"),
        ({"workers": -1}, "--workers -1"),
        ({"workers": 100_000}, "--workers 100000: on the .* cores here at most"),
    ],
)
def test_a_flag_out_of_range_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, [chat("a", "b")], **changes)


def test_a_piece_of_an_answer_does_not_train_the_document_before_it(tmp_path: Path) -> None:
    rows = [chat("c", "d"), chat("a", "b" * 100)]
    data = run(tmp_path, rows, overlong="split", packing="best-fit", max_seq_len=90)
    short, rest = data.doc_lengths(0)
    assert data.doc_lengths(1) == [90], "the beginning of the long answer"
    assert data.assistant_mask[0, short] == 0
    assert data.assistant_mask[0, short + 1 : short + rest].all(), "the rest of it"
