"""`ds-sft fit --probe`: real runs beside the prediction; failures are rows; nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import ROOT

from ds_sft import cli, fit_probe, fit_rank
from ds_sft.data.packed import PackedDataset
from ds_sft.engine import rates
from ds_sft.engine.config import engine_config, read_json
from ds_sft.engine.memory import GIB, Activations
from ds_sft.errors import ConfigError
from ds_sft.fit import model_of, read_configs
from ds_sft.fit_question import FitFlags, Machine, Question
from ds_sft.fit_rows import Row, best_of_each, usable
from ds_sft.recipe.named import RECIPES

SHIPPED = ROOT / "ds_configs"
MACHINE = Machine(gpu_memory=12 * GIB, host_memory=64 * GIB, nvme=10 * GIB)
RATES = rates.assumed(12 * GIB, several_nodes=False)


def question_of(model: Path, **flags: Any) -> Question:
    asked = {"max_seq_len": 64, "world_size": 2, "train_batch_size": 8, "probe": 3, **flags}
    nothing = Activations(kept=1, forward=1, head=1, layers=1, embedding=1)
    return Question(
        model=model_of(str(model)), flags=FitFlags(model_id=str(model), **asked),
        activations=lambda tokens: nothing,
    )  # fmt: skip


def candidates(model: Path) -> list[tuple[Row, dict[str, Any]]]:
    question = question_of(model)
    return best_of_each(question, usable(question, read_configs(SHIPPED))[0], MACHINE, RATES)


@pytest.fixture
def candidate(tiny_model: Path) -> tuple[Row, dict[str, Any]]:
    return candidates(tiny_model)[0]


def test_a_candidate_of_each_file_that_fits_comes_fastest_first(tiny_model: Path) -> None:
    found = candidates(tiny_model)
    names = [row.name for row, _ in found]
    assert names[0] == "zero3"
    assert len(set(names)) == len(names) > fit_probe.CANDIDATES
    seconds = [row.seconds.total for row, _ in found]
    assert seconds == sorted(seconds)
    assert not any(row.short for row, _ in found)


def test_synthetic_packs_have_the_asked_length_and_are_trained_whole(
    tiny_model: Path, tmp_path: Path
) -> None:
    question = question_of(tiny_model, max_seq_len=48, per_device_batch=3)
    fit_probe.write_data(question, tmp_path / "data")
    data = PackedDataset.open(tmp_path / "data")
    assert (data.num_packs, data.max_seq_len) == (6, 48)
    assert [data.doc_lengths(i) for i in range(6)] == [[48]] * 6
    assert data.assistant_counts.tolist() == [47] * 6
    assert 0 <= data.tokens.min() <= data.tokens.max() < question.model.vocab_size


def outcome(
    base: Path, candidate: tuple[Row, dict[str, Any]], results: list[dict[str, Any]], code: int,
    said: str = "",
) -> fit_probe.Probed:  # fmt: skip
    for rank, result in enumerate(results):
        whole = {"seconds": [9.0, 2.0, 4.0, 3.0], "peak": 5, "problem": "", **result}
        Path(f"{base}.rank{rank}.json").write_text(json.dumps(whole))
    Path(f"{base}.log").write_text(said)
    return fit_probe._read(*candidate, 7, base, code)


def test_the_first_step_does_not_count_and_the_fullest_rank_does(
    candidate: tuple[Row, dict[str, Any]], tmp_path: Path
) -> None:
    got = outcome(tmp_path / "x", candidate, [{}, {"peak": 11}], 0)
    assert (got.peak, got.seconds, got.problem, got.predicted_peak) == (11, 3.0, "", 7)


@pytest.mark.parametrize(
    ("results", "code", "said", "problem"),
    [
        ([{}, {"problem": "out of memory (9.9 GB)"}], 1, "", "out of memory (9.9 GB)"),
        ([{}], -9, "", "out of memory (a rank was killed"),
        ([], 247, "", "out of memory (a rank was killed"),
        ([{}], 2, "error: no compiler here\n[launcher] bye", "failed: no compiler here"),
        ([], 1, "Traceback\nValueError: x\n", "failed: ValueError: x"),
        ([], 1, "ValueError: x\n[t] [ERROR] [launch.py:259:y] code = -6", "failed: ValueError: x"),
        ([], 250, "Fatal Python error: Aborted\n\nExtension modules: a, b", "failed: Fatal Python"),
        ([], 1, "", "failed: nothing was said"),
    ],
)
def test_a_candidate_that_fails_is_a_row(
    results: list[dict[str, Any]], code: int, said: str, problem: str,
    candidate: tuple[Row, dict[str, Any]], tmp_path: Path,
) -> None:  # fmt: skip
    got = outcome(tmp_path / "x", candidate, results, code, said)
    assert got.problem.startswith(problem)
    assert (got.peak, got.seconds) == (None, None)
    assert fit_probe.fastest([got]) is None


def test_the_fastest_is_the_fastest_measured_that_fits(
    candidate: tuple[Row, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick, failed = (
        outcome(tmp_path / name, candidate, [{"seconds": [1.0, seconds], "peak": peak}], code)
        for name, seconds, peak, code in [
            ("slow", 3.0, GIB, 0), ("quick", 2.0, 13 * GIB, 0), ("failed", 1.0, 0, 1)
        ]
    )  # fmt: skip
    assert fit_probe.fastest([slow, quick, failed]) == quick
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    too_large = fit_probe.within(quick, MACHINE)  # on a card that has more than was asked about
    assert "with the CUDA context is too much" in too_large.problem
    assert fit_probe.within(slow, MACHINE) == slow
    assert fit_probe.fastest([slow, too_large, failed]) == slow


def test_a_rank_that_runs_out_of_memory_says_so_and_leaves_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(MemoryError), fit_rank.leaving_a_result(str(tmp_path / "x")):
        bytearray(1 << 62)
    said = json.loads((tmp_path / "x.rank1.json").read_text())
    assert said["problem"].startswith("out of memory (")
    with pytest.raises(ValueError, match="y"), fit_rank.leaving_a_result(str(tmp_path / "y")):
        raise ValueError("y")
    assert json.loads((tmp_path / "y.rank1.json").read_text())["problem"] == ""


def test_a_rank_ends_with_its_parent_and_takes_the_files_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(fit_rank.os, "_exit", lambda code: ended.set())
    (tmp_path / "work").mkdir()
    (tmp_path / "swap").mkdir()
    lock = tmp_path / "work" / fit_probe.HELD
    with fit_probe.held(lock):
        fit_rank.end_with(lock, [tmp_path / "work", tmp_path / "swap"])
        assert not ended.wait(0.2)
    assert ended.wait(5)
    assert list(tmp_path.iterdir()) == []


def test_on_a_cpu_the_host_and_the_gpu_are_one_memory(
    candidate: tuple[Row, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = candidate[0].need
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    here = fit_probe.predicted_peak(need, 2)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert fit_probe.predicted_peak(need, 2) == need.gpu.total - need.gpu.slack
    assert here - fit_probe.predicted_peak(need, 2) == need.host // 2


@pytest.mark.parametrize(
    ("words", "accelerator", "message"),
    [
        (["--probe", "1"], "cpu", "--probe=1 must be from 2 to 1000"),
        (["--probe", "-2"], "cpu", "--probe=-2 must be from 2 to 1000"),
        (["--probe", "3"], None, "this machine has none"),
        (["--probe", "3", "--gpu-memory", "512MiB"], "cpu", "nothing fits as asked"),
    ],
)
def test_a_probe_that_cannot_be_made_ends_in_one_line(
    words: list[str], accelerator: str | None, message: str, tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if accelerator:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    shared = ["--model-id", str(tiny_model), "--max-seq-len", "64", "--host-memory", "64GiB",
              "--configs", str(SHIPPED)]  # fmt: skip
    gpu = [] if "--gpu-memory" in words else ["--gpu-memory", "12GiB"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["fit", *shared, *gpu, *words])
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert said.startswith("error: ")
    assert message in said


def test_a_full_disk_is_one_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(question: Question, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(fit_probe, "write_data", full)
    with pytest.raises(ConfigError, match=r"cannot write its files .*No space left.*TMPDIR"):
        fit_probe.probe(question_of(tiny_model), {"zero3": read_json(SHIPPED / "zero3.json")},
                        MACHINE, RATES)  # fmt: skip


def test_more_ranks_than_this_machine_has_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fit_probe.check_device(2)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        fit_probe.check_device(3)


def words_of(model: Path, configs: Path, *more: object) -> list[str]:
    words = ["fit", "--model-id", model, "--configs", configs, "--max-seq-len", 64,
             "--gpu-memory", "12GiB", "--host-memory", "64GiB", "--world-size", 2,
             "--train-batch-size", 4, "--compute-dtype", "float32", "--probe", 2]  # fmt: skip
    return [str(word) for word in [*words, *more]]


@pytest.mark.slow
def test_a_probe_measures_real_runs_and_writes_the_fastest(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """From a config.json alone, in a directory of its own for what is temporary."""
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    for folder in (model, scratch):
        folder.mkdir()
    (model / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    monkeypatch.setattr(fit_probe.tempfile, "tempdir", None)
    for name, value in harness.cpu_env(TMPDIR=str(scratch), PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    written = tmp_path / "my.json"
    cli.main(words_of(model, SHIPPED / "zero3.json", "--json", "--write", written))
    out = capsys.readouterr()
    (ran,) = json.loads(out.out)["probed"]
    assert (ran["name"], ran["problem"]) == ("zero3", "")
    assert ran["measured"]["peak"] > 100e6  # a process with torch in it
    assert ran["measured"]["tokens_per_s"] == pytest.approx(4 * 64 / ran["measured"]["seconds"])
    assert ran["memory"] == "resident on the host"
    assert "random weights" in out.err
    assert not list(scratch.glob("ds-sft-*"))
    config = engine_config(
        read_json(written), written, RECIPES["qwen3-8b"], world_size=2, per_device_batch=1
    )
    assert "offload_optimizer" not in config["zero_optimization"]


def test_sigterm_and_a_closed_terminal_are_ctrl_c_for_a_probe() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt), fit_probe.ending_in_order():
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_probe_that_is_interrupted_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    import psutil

    ours, torchs = tmp_path / "ours", tmp_path / "torchs"
    ours.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ds_sft", *words_of(tiny_model, SHIPPED / "zero3.json")],
        env=harness.cpu_env(TMPDIR=str(ours), TORCHINDUCTOR_CACHE_DIR=str(torchs)), cwd=ROOT,
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        # Where the tests run in the background of a shell, Ctrl-C means nothing to what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "with sizes for this model" in line:
            break
    root = psutil.Process(process.pid)
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 and process.poll() is None:
        ranks = [p for p in root.children(recursive=True) if "ds_sft.fit_rank" in p.cmdline()[-2:]]
    started = root.children(recursive=True)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130, rest
    assert "interrupted" in rest
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert list(ours.iterdir()) == []
