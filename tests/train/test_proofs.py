"""Each start-up proof finds what it is there to find, on every rank, and says what to do."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import Result, Training, launch_many

from ds_sft.engine import proofs


def test_a_nonce_is_read_when_it_is_there_and_not_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "NONCE_WAIT_SECONDS", 0.01)
    (tmp_path / ".nonce").write_text("abc")
    assert proofs._reads(tmp_path / ".nonce", "abc")
    assert not proofs._reads(tmp_path / ".nonce", "abd")
    assert not proofs._reads(tmp_path / "nothing", "abc")


@pytest.fixture(scope="module")
def said(tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two ranks say when each proof meets its broken world (proof_worker.py)."""
    out = tmp_path_factory.mktemp("proofs") / "run"
    command = harness.script_command(2, Path(__file__).with_name("proof_worker.py"))
    words = map(str, harness.flags(tiny_model, tiny_data, out))
    done = subprocess.run(
        [*command, *words], env=harness.cpu_env(PYTHONPATH=str(harness.ROOT)), cwd=harness.ROOT,
        text=True, timeout=300, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("world", ["one disk", "average", "isolated", "counts"])
def test_a_healthy_world_passes(said: str, world: str) -> None:
    assert f"\n{world}: passed" in said


HOST = socket.gethostname()
BROKEN = {
    "two disks": rf"rank 1 on host {re.escape(HOST)} does not see .* disk that all hosts share",
    "two data sets": r"rank 1 on host \S+ has another data set .* copy the same one",
    "two checkpoints": r"rank 1 .* would start from checkpoints/step-1, rank 0 from .*step-0",
    "sum": r"gradients of 1\.\.2 on 2 ranks gave 3\.0000, not their mean 1\.5",
    "leaky": r"documents of a pack are not isolated .* moved the other by [1-9].* --attn-impl sdpa",
    "not finite": r"hidden states are not finite .* not finite: model\.layers\.1\.mlp\.up_proj",
    "miscounted": r"assistant_counts\.npy says .* run ds-sft verify ",
}


@pytest.mark.slow
@pytest.mark.parametrize("world", BROKEN)
def test_a_broken_world_is_refused_by_every_rank(said: str, world: str) -> None:
    [line] = [row for row in said.splitlines() if row.startswith(f"{world}: ")]
    assert line.startswith(f"{world}: 2 ")
    assert re.search(BROKEN[world], line), line
    assert f"\n{world} agreed\n" in said


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """Whole trainings of two ranks that a proof ends before the first step."""
    work = tmp_path_factory.mktemp("refused")
    damaged = work / "damaged-data"
    shutil.copytree(tiny_data, damaged)
    counts = np.load(damaged / "assistant_counts.npy")
    np.save(damaged / "assistant_counts.npy", counts + 1)
    for rank in range(2):
        shutil.copytree(tiny_data, work / f"data-{rank}")
    with (work / "data-1/manifest.json").open("a") as file:
        file.write("\n")
    wanted = {
        "damaged": (damaged, {}),
        "skipped": (damaged, {"--skip-checks": True, "--num-train-steps": 2}),
        "other data": (work / "data-@RANK@", {}),
        "no data": (work / "nothing-@RANK@", {}),
        "no data on rank 1": (work / "only-@RANK@", {}),
    }
    shutil.copytree(tiny_data, work / "only-0")
    trainings = [
        Training(harness.flags(tiny_model, data, work / name.replace(" ", "-"), changes))
        for name, (data, changes) in wanted.items()
    ]
    return dict(zip(wanted, launch_many(2, trainings, work), strict=True))


@pytest.mark.slow
def test_wrong_assistant_counts_end_the_run_in_one_line_that_names_verify(
    runs: dict[str, Result],
) -> None:
    run = runs["damaged"]
    assert run.codes == [2, 2]
    assert len(errors(run)) == 1
    assert "run ds-sft verify" in errors(run)[0]
    assert "Traceback" not in run.text
    assert not (run.out / "metrics.jsonl").exists()
    assert runs["skipped"].codes == [0, 0]
    assert "verified" not in runs["skipped"].text


@pytest.mark.slow
def test_a_host_with_other_data_is_named(runs: dict[str, Result]) -> None:
    run = runs["other data"]
    assert run.codes == [2, 2]
    assert len(errors(run)) == 1
    assert f"rank 1 on host {HOST} has another data set" in errors(run)[0]


@pytest.mark.slow
def test_rank_0_speaks_first_and_a_rank_that_fails_alone_speaks_for_itself(
    runs: dict[str, Result],
) -> None:
    """The other rank waits in a collective meanwhile; the launcher (here: many_runs) ends it."""
    everybody, alone = errors(runs["no data"]), errors(runs["no data on rank 1"])
    assert everybody[0].startswith("error: ")
    assert "rank" not in everybody[0].partition("nothing-0")[0]
    assert runs["no data on rank 1"].codes[1] == 2
    assert len(alone) == 1
    assert alone[0].startswith(f"error: rank 1 on host {HOST}: ")


def errors(run: Result) -> list[str]:
    """The lines that tell a person what is wrong."""
    return [line for line in run.text.splitlines() if line.startswith("error: ")]
