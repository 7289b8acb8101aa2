"""A name that is no path is looked up on the Hub once, and both readings are said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from preparing import TINY

from ds_sft.data import hub
from ds_sft.data.hub import Answer
from ds_sft.data.inputs import Tables, open_inputs
from ds_sft.data.tokenizer import load_tokenizer
from ds_sft.errors import DataError

UNREACHABLE = Answer("unreachable", "no route to host")


def error(kind: type[Exception]) -> Exception:
    """One of the Hub's errors, without the HTTP response that it usually comes with."""
    made = kind.__new__(kind)
    Exception.__init__(made, "says the Hub")
    return made


@pytest.mark.parametrize(
    ("raised", "state"),
    [
        (None, "there"),
        (error(errors.RepositoryNotFoundError), "absent"),
        (error(errors.GatedRepoError), "there"),
        (error(errors.HfHubHTTPError), "there"),
        (error(errors.OfflineModeIsEnabled), "unreachable"),
        (OSError("no route to host"), "unreachable"),
    ],
)
def test_what_the_hub_says_of_a_name(
    raised: Exception | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repo_info(_self: Any, name: str, repo_type: str, timeout: float) -> None:
        assert (name, repo_type) == ("org/name", "dataset")
        assert timeout <= 5
        if raised:
            raise raised

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    assert hub.ask("dataset", "org/name").state == state


def test_a_name_that_cannot_be_an_id_is_absent() -> None:
    assert hub.ask("model", "no id").state == "absent"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (UNREACHABLE, r"no directory here, and .* cannot be asked \(no route to host\): check"),
        (Answer("absent"), "no directory here, and the Hub has no such model: check the name"),
    ],
)
def test_a_tokenizer_that_is_nowhere_is_refused_with_both_readings(
    answer: Answer, said: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ask", lambda *_: answer)
    with pytest.raises(DataError, match=f"--tokenizer a/b is {said}"):
        load_tokenizer("a/b")


def test_a_cached_tokenizer_is_loaded_without_a_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cache / "models--org--name"
    shutil.copytree(TINY, root / "snapshots" / "abc123")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(hub, "ask", lambda *_: UNREACHABLE)
    assert load_tokenizer("org/name").chat_template == load_tokenizer(str(TINY)).chat_template


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (UNREACHABLE, "as a data set's id it is in no cache and .* cannot be asked"),
        (Answer("absent"), "the Hub has no such data set: check the name"),
    ],
)
def test_a_mistyped_input_is_refused_with_both_readings_and_a_near_name(
    answer: Answer, said: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("data").mkdir()
    Path("data/chats.jsonl").touch()
    monkeypatch.setattr(hub, "ask", lambda *_: answer)
    with pytest.raises(DataError, match=f"no file or directory here, and {said}.*chats.jsonl?"):
        open_inputs(["data/chats.jsnl"], Tables())
    with pytest.raises(DataError, match=r"is not a file.*; did you mean data/chats.jsonl\?"):
        open_inputs(["./data/chat.jsonl"], Tables())
    with pytest.raises(DataError, match=r"--input a/b .*, and .*") as refused:
        open_inputs(["a/b"], Tables())
    assert "did you mean" not in str(refused.value)


def test_a_cached_data_set_is_left_to_the_library_without_a_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ask", lambda *_: UNREACHABLE)
    # As the library names the directory of Org/MyChats.
    Path("datasets/Org___my_chats").mkdir(parents=True)
    monkeypatch.setattr("ds_sft.data.inputs.DatasetSource", lambda name, *_: name)
    [found] = open_inputs(["Org/MyChats"], Tables())
    assert list(found.sources) == ["Org/MyChats"]
    with pytest.raises(DataError, match="it is in no cache"):
        open_inputs(["Org/Others"], Tables())
