"""Too little memory ends a run in one line that says what to try, and costs no completed step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import Result, Training, launch_many

from ds_sft.engine import step as step_module
from ds_sft.engine import used_memory as measuring
from ds_sft.errors import OutOfMemory
from ds_sft.run import memory
from ds_sft.run_config import RunConfig

ZERO3 = harness.ROOT / "ds_configs/zero3.json"


def plan(**changes: Any) -> Any:
    """What the messages use of a plan."""
    run = RunConfig(data=Path("d"), **{"deepspeed_config": ZERO3, **changes})
    config = json.loads(run.deepspeed_config.read_text())
    return SimpleNamespace(
        run=run, ds_config=config, recipe=SimpleNamespace(model_id="Qwen/Qwen3-8B", apollo=None),
        data=SimpleNamespace(max_seq_len=4096), batches=SimpleNamespace(world_size=2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "peak", "too_much"),
    [(0.0, 1e9, False), (10.0, 10.9, False), (10.0, 11.1, True), (10.0, 9.0, False)],
)
def test_a_budget_may_be_exceeded_by_a_tenth(
    budget: float, peak: float, too_much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "peak_memory_gb", lambda: peak)
    assert memory.over_budget(RunConfig(data=Path("d"), memory_budget_gb=budget)) is too_much


@pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(budget: float) -> None:
    from ds_sft.errors import ConfigError

    with pytest.raises(ConfigError, match="--memory-budget-gb="):
        RunConfig(data=Path("d"), memory_budget_gb=budget)


def test_one_rank_over_its_budget_is_known_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective adds what the other rank says: flag 0, and a peak that is too large."""
    other = torch.tensor([2.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    monkeypatch.setattr(step_module.dist, "all_reduce", lambda mine: mine.add_(other))
    sums, flags = step_module.agree(torch.tensor([1.0, 1.0]), False, False)
    assert sums == [3.0, 4.0]
    assert flags == [False, True]


def real_host_failure() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def real_python_failure() -> None:
    bytearray(1 << 62)


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FAILURES = {
    "torch on the host": (real_host_failure, "host"),
    "python": (real_python_failure, "host"),
    "mmap": (raising(OSError(12, "Cannot allocate memory")), "host"),
    "gpu": (
        raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")),
        "GPU",
    ),
    "pinned or NCCL": (
        raising(RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")),
        "GPU or page-locked host",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_allocation_becomes_one_line_with_what_was_measured(name: str) -> None:
    fail, what = FAILURES[name]
    with pytest.raises(OutOfMemory) as caught, memory.in_one_line(plan(per_device_batch=4)):
        fail()
    message = str(caught.value)
    assert message.startswith(f"out of {what} memory: ")
    assert "\n" not in message
    assert "GB resident at the peak" in message
    assert "try --per-device-batch 2, then --deepspeed-config " in message
    assert "`ds-sft fit --model-id Qwen/Qwen3-8B --max-seq-len 4096 --world-size 2`" in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("error", "config", "following"),
    [
        ("gpu", "zero3", "zero3_offload_optimizer"),
        ("pinned or NCCL", "zero3", "zero3_offload_optimizer"),
        ("pinned or NCCL", "zero3_offload_optimizer", "zero3_offload_optimizer_nvme"),
        ("python", "zero3_offload_optimizer", "zero3_offload_optimizer_nvme"),
        ("gpu", "zero3_offload_optimizer_nvme", "zero3_offload_nvme"),
    ],
)
def test_the_next_json_needs_less_of_the_memory_that_ran_out(
    error: str, config: str, following: str
) -> None:
    chosen = plan(deepspeed_config=ZERO3.with_name(f"{config}.json"))
    with (
        pytest.raises(OutOfMemory, match=f"--deepspeed-config .*/{following}.json;"),
        memory.in_one_line(chosen),
    ):
        FAILURES[error][0]()


def test_what_was_predicted_is_said_beside_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = {
        "phase": "update",
        "weights": 2_000_000_000,
        "network": 5_000_000,
        "total": 2_500_000_000,
    }
    facts = {"gpu": gpu, "host": {"total": 7_000_000_000}}
    fake = SimpleNamespace(facts=lambda plan: facts)
    monkeypatch.setattr(memory, "plan_memory", fake)
    said = memory.what_to_try(plan(), "gpu")
    assert said.startswith(
        "predicted were 2.50 GB a GPU in the update (weights 2.00 GB) and 7.00 GB of host memory "
        "a node; try --deepspeed-config "
    )
    fake.facts = real_python_failure
    assert memory.what_to_try(plan(), "gpu").startswith("try --deepspeed-config ")


def test_when_there_is_no_next_json_it_says_so() -> None:
    last = plan(deepspeed_config=ZERO3.with_name("zero3_offload_nvme.json"))
    assert "try more GPUs, or data with a shorter " in memory.what_to_try(last, "gpu")


OTHERS = (ValueError("out of memory"), OSError(28, "no space"), RuntimeError("x"), SystemExit(75))


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_left_alone(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, memory.in_one_line(plan()):
        raise error
    assert caught.value is error


def test_only_other_ranks_print_since_rank_zeros_line_is_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(OutOfMemory), memory.in_one_line(plan()):
            raise MemoryError
        said = capsys.readouterr().err
        assert said.startswith("error: rank 3 on host ") if rank == "3" else said == ""


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("memory")
    smoke = {"--preset": "smoke-12gb", "--steps-per-checkpoint": 100}
    wanted: dict[str, tuple[str, dict[str, Any], str, dict[str, str]]] = {
        "plain": ("plain", {"--memory-budget-gb": 1000}, "ds_sft.train", {}),
        "over": ("halves", {**smoke, "--memory-budget-gb": 0.05}, "ds_sft.train", {}),
        "gone on": ("halves", {}, "ds_sft.train", {}),
        "short": ("short", {}, "short_of_memory", {"SHORT": "1"}),
    }
    trainings = [
        Training(harness.flags(tiny_model, tiny_data, work / out, changes), env, module)
        for out, changes, module, env in wanted.values()
    ]
    here = str(Path(__file__).parent)
    path = os.pathsep.join([str(harness.ROOT), here])
    return dict(zip(wanted, launch_many(2, trainings, work, PYTHONPATH=path), strict=True))


@pytest.mark.slow
def test_a_run_over_its_budget_ends_on_all_ranks_with_its_last_step_saved(
    runs: dict[str, Result],
) -> None:
    over = runs["over"]
    assert over.codes == [2, 2], over.text[-3000:]
    errors = [line for line in over.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "more than --memory-budget-gb 0.05 and a tenth (0.06 GB): " in errors[0]
    assert "Traceback" not in over.text
    assert f"[checkpoint] wrote {over.out}/checkpoints-temp/step-0 in " in over.text


@pytest.mark.slow
def test_it_goes_on_from_there_with_the_same_numbers(runs: dict[str, Result]) -> None:
    plain, halves = runs["plain"], runs["gone on"]
    assert plain.codes == halves.codes == [0, 0], halves.text[-3000:]
    assert "at step 1" in halves.text
    for column in ("label", "loss", "lr", "grad_norm"):
        assert halves.column(column) == plain.column(column)


@pytest.mark.slow
def test_the_run_says_its_preset_and_threads_and_keeps_its_mark(runs: dict[str, Result]) -> None:
    said = runs["over"].text
    assert "[init] 1 OMP thread a rank (OMP_NUM_THREADS; " in said
    assert "[init] preset smoke-12gb: epochs=0.0 (from default), train-batch-size=8 (from flag), "
    assert "[init] NOT FOR PUBLISHING: preset smoke-12gb" in said
    assert "preset" not in runs["plain"].text
    record = json.loads((runs["plain"].out / "run.json").read_text())
    assert "not_for_publishing" not in record
    record = json.loads((runs["gone on"].out / "run.json").read_text())
    assert record["not_for_publishing"].startswith("NOT FOR PUBLISHING: preset smoke-12gb")


@pytest.mark.slow
def test_the_rank_that_is_out_of_memory_says_so_without_a_traceback(
    runs: dict[str, Result],
) -> None:
    short = runs["short"]
    assert short.codes[1] == 2, short.text[-3000:]
    (line,) = [line for line in short.text.splitlines() if line.startswith("error: rank 1 on ")]
    assert "out of host memory: " in line
    assert "1125899906842624 bytes" in line
    assert "Traceback" not in short.text.split(line)[0]
    assert short.column("label") == [0, 1, 2]
