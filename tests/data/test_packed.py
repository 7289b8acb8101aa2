"""The packed data set: written whole or not at all, opened only when it fits together."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from ds_sft.data import packed
from ds_sft.data.claim import LOCK
from ds_sft.data.packed import PackedDataset, check_hashes
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.errors import DataError


def write_two_packs(out: Path, *, replace: bool = False) -> Path:
    with PackedWriter(out, max_seq_len=6, replace=replace) as writer:
        writer.add_pack(np.arange(1, 6), np.array([1, 0, 1, 1, 0]), [3, 2])
        writer.add_pack(np.arange(7, 13), np.array([0, 0, 0, 0, 0, 1]), [6])
        writer.commit({"packing": "test"})
    return out


def test_what_is_written_is_what_is_opened(tmp_path: Path) -> None:
    data = PackedDataset.open(write_two_packs(tmp_path / "deep" / "data"))
    assert data.num_packs == 2
    assert data.tokens.tolist() == [[1, 2, 3, 4, 5, 0], [7, 8, 9, 10, 11, 12]]
    assert data.assistant_mask.tolist() == [[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert [data.doc_lengths(pack) for pack in range(2)] == [[3, 2], [6]]
    assert data.pack_offsets.tolist() == [0, 2, 3]
    assert data.tokenizer_dir is None
    dtypes = {name: getattr(data, name).dtype for name in packed.ARRAY_DTYPES}
    assert dtypes == packed.ARRAY_DTYPES


def test_the_first_position_of_a_row_is_not_counted_as_a_target(tmp_path: Path) -> None:
    data = PackedDataset.open(write_two_packs(tmp_path / "data"))
    assert data.assistant_counts.tolist() == [2, 1]


def test_the_manifest_names_version_length_and_the_hash_of_each_array(tmp_path: Path) -> None:
    data = PackedDataset.open(write_two_packs(tmp_path / "data"))
    assert data.manifest["format_version"] == 1
    assert data.manifest["max_seq_len"] == 6
    assert data.manifest["packing"] == "test"
    raw = (tmp_path / "data" / "manifest.json").read_bytes()
    assert data.manifest_sha256 == hashlib.sha256(raw).hexdigest()
    assert sorted(check_hashes(data)) == sorted(f"{name}.npy" for name in packed.ARRAY_DTYPES)


def test_a_changed_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    out = write_two_packs(tmp_path / "data")
    raw = bytearray((out / "tokens.npy").read_bytes())
    raw[-1] ^= 1
    (out / "tokens.npy").write_bytes(raw)
    with pytest.raises(DataError, match=r"tokens\.npy is not the file that prepare wrote"):
        check_hashes(PackedDataset.open(out))


def test_a_data_set_of_the_first_trainer_is_accepted(tmp_path: Path) -> None:
    out = write_two_packs(tmp_path / "data")
    (out / "manifest.json").write_text('{"max_seq_len": 6}')
    data = PackedDataset.open(out)
    assert data.num_packs == 2
    assert check_hashes(data) == []


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def write_until_the_disk_is_full() -> None:
        with PackedWriter(tmp_path / "data", 6) as writer:
            writer.add_pack(np.arange(3), np.ones(3), [3])
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        write_until_the_disk_is_full()
    assert list(tmp_path.iterdir()) == []


def test_the_remains_of_a_killed_writer_are_replaced(tmp_path: Path) -> None:
    stale = tmp_path / "data.partial"
    for directory in (stale / "tokenizer", stale / "validation.partial"):
        directory.mkdir(parents=True)
        (directory / "junk").write_text("half")
    (stale / LOCK).write_text("process 1 on a machine that is off")
    (stale / "tokens.npy").write_text("half")
    out = write_two_packs(tmp_path / "data")
    assert not stale.exists()
    assert sorted(entry.name for entry in out.iterdir()) == sorted(
        ["manifest.json", *(f"{name}.npy" for name in packed.ARRAY_DTYPES)]
    )


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
@pytest.mark.parametrize("content", ["mine.txt", "tokenizer"])
def test_a_directory_beside_it_that_is_not_ours_is_never_touched(
    tmp_path: Path, suffix: str, content: str
) -> None:
    out = write_two_packs(tmp_path / "data")
    theirs = tmp_path / f"data{suffix}"
    theirs.mkdir()
    (theirs / content).write_text("precious")
    with pytest.raises(DataError, match=f"data{suffix} is in the way and holds .*move it away"):
        write_two_packs(out, replace=True)
    assert (theirs / content).read_text() == "precious"
    assert PackedDataset.open(out).num_packs == 2


def test_arrays_beside_it_that_no_writer_holds_a_lock_on_are_not_deleted(tmp_path: Path) -> None:
    theirs = tmp_path / "data.partial" / "tokens.npy"
    theirs.parent.mkdir()
    theirs.write_text("precious")
    with pytest.raises(DataError, match=r"is in the way and holds no \.prepare\.lock"):
        write_two_packs(tmp_path / "data")
    assert theirs.read_text() == "precious"


def test_what_appears_in_the_place_of_the_replaced_meanwhile_is_kept(tmp_path: Path) -> None:
    out = write_two_packs(tmp_path / "data")
    theirs = tmp_path / "data.replaced" / "mine.txt"
    with PackedWriter(out, 6, replace=True) as writer:
        theirs.parent.mkdir()
        theirs.write_text("precious")
        with pytest.raises(DataError, match="is in the way"):
            writer.commit({})
    assert theirs.read_text() == "precious"
    assert PackedDataset.open(out).manifest["packing"] == "test"


def test_a_second_writer_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "data", 6) as first:
        first.add_pack(np.arange(1, 6), np.array([1, 0, 1, 1, 0]), [3, 2])
        with pytest.raises(DataError, match=f"another prepare .process {os.getpid()} on .*data"):
            write_two_packs(tmp_path / "data")
        first.commit({"packing": "first"})
        # The name is free from the commit on: a second writer's partial is not the first's.
        with pytest.raises(DataError, match="exists"):
            write_two_packs(tmp_path / "data")
        second = PackedWriter(tmp_path / "data", 6, replace=True).__enter__()
    assert second.partial.is_dir()
    second.commit({"packing": "second"})
    assert PackedDataset.open(tmp_path / "data").manifest["packing"] == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_an_existing_data_set_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = write_two_packs(tmp_path / "data")
    before = (out / "tokens.npy").stat().st_ino
    with pytest.raises(DataError, match="exists: choose another --out, or add --force"):
        write_two_packs(out)
    assert (out / "tokens.npy").stat().st_ino == before
    write_two_packs(out, replace=True)
    assert (out / "tokens.npy").stat().st_ino != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


class _Killed(BaseException):
    pass


def _kill_between_the_renames(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what a kill leaves there: no cleaning up, no lock."""

    def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(
            Path,
            "rename",
            lambda self, to: killed() if self.suffix == ".partial" else rename(self, to),
        )
        patch.setattr(PackedWriter, "_abandon", lambda writer: os.close(writer._lock))
        with pytest.raises(_Killed):
            write_two_packs(out, replace=True)


@pytest.mark.parametrize("replace", [False, True])
def test_a_kill_between_the_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    out = write_two_packs(tmp_path / "data")
    inode = (out / "tokens.npy").stat().st_ino
    _kill_between_the_renames(out, monkeypatch)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data.partial", "data.replaced"]
    with pytest.raises(DataError, match=r"data is not there, but .*data\.replaced is: .*prepare"):
        PackedDataset.open(out)
    if replace:
        with PackedWriter(out, 6, replace=True):
            pass
    else:
        with pytest.raises(DataError, match="exists"):
            write_two_packs(out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert (out / "tokens.npy").stat().st_ino == inode
    assert PackedDataset.open(out).num_packs == 2


def test_a_rename_that_fails_puts_the_old_data_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write_two_packs(tmp_path / "data")
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        write_two_packs(out, replace=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert PackedDataset.open(out).num_packs == 2


def _remove_manifest(out: Path) -> None:
    (out / "manifest.json").unlink()


def _cut_tokens(out: Path) -> None:
    raw = (out / "tokens.npy").read_bytes()
    (out / "tokens.npy").write_bytes(raw[:-8])


def _other_length(out: Path) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "max_seq_len": 8}))


def _newer_format(out: Path) -> None:
    (out / "manifest.json").write_text('{"max_seq_len": 6, "format_version": 99}')


def _float_tokens(out: Path) -> None:
    np.save(out / "tokens.npy", np.zeros((2, 6)))


def _too_many_tokens(out: Path) -> None:
    np.save(out / "doc_lens.npy", np.array([3, 9, 6], np.int32))


def _lost_documents(out: Path) -> None:
    np.save(out / "doc_lens.npy", np.array([3, 2], np.int32))


def _missing_array(out: Path) -> None:
    (out / "assistant_mask.npy").unlink()


def _bad_json(out: Path) -> None:
    (out / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_manifest, "has no manifest.json"),
        (_cut_tokens, "tokens.npy cannot be read"),
        (_other_length, "tokens.npy has shape"),
        (_newer_format, "data format 99"),
        (_float_tokens, "holds float64, not integers"),
        (_too_many_tokens, "puts 12 tokens into a pack of 6"),
        (_lost_documents, "does not run from 0 to the 2 documents"),
        (_missing_array, "assistant_mask.npy is missing"),
        (_bad_json, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_data_set_is_refused_in_one_line(tmp_path: Path, damage, message: str) -> None:
    out = write_two_packs(tmp_path / "data")
    damage(out)
    with pytest.raises(DataError) as caught:
        PackedDataset.open(out)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "prepare" in str(caught.value)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a directory: make it with"):
        PackedDataset.open(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["chats.jsonl", "manifest.txt"])
def test_force_never_deletes_what_is_not_a_data_set(tmp_path: Path, content: str) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / content).write_text("mine")
    with pytest.raises(DataError, match="--force does not delete it"):
        PackedWriter(out, 8, replace=True)
    assert (out / content).read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("manifest.json", '{"name": "an app"}', "has a manifest.json that is not a data set's"),
        ("manifest.json", "{", "has a manifest.json that is not a data set's"),
        ("notes.txt", "precious", "holds notes.txt, which is no file of a data set"),
        ("validation", "precious", "has a directory validation that is no directory of its own"),
    ],
)
def test_force_refuses_a_data_set_with_anything_else_in_it(
    tmp_path: Path, name: str, text: str, why: str
) -> None:
    out = write_two_packs(tmp_path / "data")
    (out / name).write_text(text)
    with pytest.raises(DataError, match=f"{why}, so --force does not delete it"):
        PackedWriter(out, 8, replace=True)
    assert (out / name).read_text() == text


def test_force_refuses_a_directory_with_a_manifest_alone(tmp_path: Path) -> None:
    out = write_two_packs(tmp_path / "data")
    for name in packed.ARRAY_DTYPES:
        (out / f"{name}.npy").unlink()
    with pytest.raises(DataError, match="holds no array of a data set"):
        PackedWriter(out, 8, replace=True)


def test_force_replaces_a_data_set_with_its_validation_part(tmp_path: Path) -> None:
    out = write_two_packs(tmp_path / "data")
    shutil.copytree(out, out / "validation")
    assert PackedDataset.open(write_two_packs(out, replace=True)).num_packs == 2
    assert not (out / "validation").exists()


def test_a_link_and_a_nameless_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for out, words in ((tmp_path / "link", "is a link"), (Path(), "has no name")):
        with pytest.raises(DataError, match=words):
            PackedWriter(out, 8, replace=True)
