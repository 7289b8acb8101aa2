"""A loss or a gradient that is not finite ends the run before any weight changes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import Result, Training, launch_many

from ds_sft.engine import step as step_module
from ds_sft.engine.step import train_step
from ds_sft.errors import TrainingDiverged

DAMAGE = {"nan": math.nan, "inf": math.inf}


class FakeEngine:
    """What `train_step` uses of a DeepSpeed engine; counts the updates."""

    device = torch.device("cpu")

    def __init__(self, loss: float, applied: bool = True) -> None:
        self.loss, self.applied, self.updates = loss, applied, 0
        self.optimizer = SimpleNamespace(param_groups=[{"lr": -1.0}, {"lr": -1.0}])

    def __call__(self, batch: Any) -> torch.Tensor:
        return torch.tensor(self.loss)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None: ...

    def step(self) -> None:
        self.updates += 1

    def was_step_applied(self) -> bool:
        return self.applied

    def get_global_grad_norm(self) -> float:
        return 2.0


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train_step` alone: one rank, two microbatches, no data."""
    micros = [SimpleNamespace(group=g, scale=0.5) for g in range(2)]
    monkeypatch.setattr(step_module, "prefetched", lambda *_: ((m, None) for m in micros))
    monkeypatch.setattr(step_module, "document_tokens", lambda *_: 100)
    monkeypatch.setattr(step_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(step_module.dist, "all_reduce", lambda tensor: None)


BATCHES: Any = SimpleNamespace(num_groups=2, micro_per_step=2, step_tokens=lambda step: [10, 30])


@pytest.mark.usefixtures("one_process")
def test_a_finite_step_is_the_mean_over_groups_with_the_learning_rate_given() -> None:
    engine = FakeEngine(60.0)
    result = train_step(engine, None, BATCHES, 3, 0.5)  # type: ignore[arg-type]
    assert result.loss == (60 / 10 + 60 / 30) / 2
    assert (result.lr, result.target_tokens, engine.updates) == (0.5, 40, 1)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("loss", DAMAGE.values())
def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(loss: float) -> None:
    engine = FakeEngine(loss)
    with pytest.raises(TrainingDiverged, match=r"loss of step 3 is (nan|inf)"):
        train_step(engine, None, BATCHES, 3, 0.5)  # type: ignore[arg-type]
    assert engine.updates == 0


@pytest.mark.usefixtures("one_process")
def test_a_gradient_that_is_not_finite_ends_the_run_when_the_engine_skipped_the_update() -> None:
    with pytest.raises(TrainingDiverged, match="gradient of step 3 is not finite"):
        train_step(FakeEngine(60.0, applied=False), None, BATCHES, 3, 0.5)  # type: ignore[arg-type]


def damaged_model(model: Path, to: Path, value: float) -> Path:
    """The tiny model with one weight of its last norm set to `value`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("divergence")
    trainings = []
    for name, value in DAMAGE.items():
        model = damaged_model(tiny_model, work / f"model-{name}", value)
        # The isolation proof rightly refuses such a model too; here the step has to.
        changes = {"--steps-per-hf-export": 1, "--skip-checks": True}
        trainings.append(Training(harness.flags(model, tiny_data, work / name, changes)))
    return dict(zip(DAMAGE, launch_many(2, trainings, work), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_ends_every_rank_with_1_and_nothing_is_written(
    runs: dict[str, Result], name: str
) -> None:
    run = runs[name]
    assert run.codes == [1, 1]
    assert "error: the loss of step 0 is" in run.text
    assert run.text.count("no weight was changed") == 1
    assert run.rows == []
    assert not list(run.out.glob("hf/*"))
    assert not list(run.out.glob("checkpoints*/*"))
    assert not (run.out / "finished").exists()
