"""A loss or a gradient that is not finite: no weight changes, and what is to blame is named."""

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
from ds_sft.run.layout import labels_in

DAMAGE = {"nan": math.nan, "inf": math.inf}
OFFLOAD = {"--deepspeed-config": harness.ROOT / "ds_configs/zero3_offload_optimizer.json"}


class FakeEngine:
    """What `train_step` uses of a DeepSpeed engine; counts the updates.

    As DeepSpeed does, it asks its optimizer for the norms and drops an update whose norm is bad.
    """

    device = torch.device("cpu")

    def __init__(self, loss: float, norm: float = 2.0) -> None:
        self.loss, self.norm, self.updates, self.applied = loss, norm, 0, False
        self.module = torch.nn.Linear(2, 2)
        self.param_names: dict[Any, str] = {}
        self.optimizer = FakeOptimizer(norm)

    def __call__(self, batch: Any) -> torch.Tensor:
        return torch.tensor(self.loss)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None: ...

    def step(self) -> None:
        (norm,) = self.optimizer._get_norm_groups()
        self.applied = math.isfinite(norm) and norm >= 0
        self.updates += self.applied

    def was_step_applied(self) -> bool:
        return self.applied

    def get_global_grad_norm(self) -> float:
        return self.norm


class FakeOptimizer:
    fp16_groups: tuple[()] = ()

    def __init__(self, norm: float) -> None:
        self.norm = norm
        self.param_groups = [{"lr": -1.0}, {"lr": -1.0}]

    def _get_norm_groups(self) -> list[float]:
        return [self.norm]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train_step` alone: one rank, two microbatches, no data."""
    micros = [SimpleNamespace(group=g, scale=0.5, packs=(7 + g,), num_active=1) for g in range(2)]
    monkeypatch.setattr(step_module, "prefetched", lambda *_: ((m, None) for m in micros))
    monkeypatch.setattr(step_module, "document_tokens", lambda *_: 100)
    monkeypatch.setattr(step_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(step_module.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(step_module.nonfinite, "everywhere", set)


BATCHES: Any = SimpleNamespace(num_groups=2, micro_per_step=2, step_tokens=lambda step: [10, 30])


@pytest.mark.usefixtures("one_process")
def test_a_finite_step_is_the_mean_over_groups_with_the_learning_rate_given() -> None:
    engine = FakeEngine(60.0)
    result = train_step(engine, None, BATCHES, 3, 0.5)  # type: ignore[arg-type]
    assert result is not None
    assert result.loss == (60 / 10 + 60 / 30) / 2
    assert (result.lr, result.target_tokens, engine.updates) == (0.5, 40, 1)
    assert result.problem == ""
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("loss", DAMAGE.values())
def test_a_loss_that_is_not_finite_drops_the_update_though_the_gradient_is(loss: float) -> None:
    engine = FakeEngine(loss)
    result = train_step(engine, None, BATCHES, 3, 0.5)  # type: ignore[arg-type]
    assert result is not None
    assert result.problem.startswith(f"the loss of step 3 is {loss} (packs 7, 8; ")
    assert engine.updates == 0
    assert engine.optimizer._get_norm_groups() == [2.0]  # left as it was


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("norm", [-1.0, math.nan, math.inf])
def test_a_gradient_that_is_not_finite_drops_the_update(norm: float) -> None:
    engine = FakeEngine(60.0, norm)
    result = train_step(engine, None, BATCHES, 3, 0.5)  # type: ignore[arg-type]
    assert result is not None
    assert "the gradient of step 3 is not finite (each pack has a finite loss; " in result.problem
    assert engine.updates == 0


def damaged_model(model: Path, to: Path, value: float) -> Path:
    """The tiny model with one weight of its last norm set to `value`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


# `bad_step` damages step 4 of rank 1 in the way that BAD names; see there.
BAD = {
    "gradient-stop": ("gradient", {}),
    "gradient-skip": ("gradient", {"--on-nonfinite": "skip"}),
    "gradient-skip-offload": (
        "gradient",
        {"--on-nonfinite": "skip", **OFFLOAD},
    ),
    "loss-skip": ("loss", {"--on-nonfinite": "skip"}),
    "never": ("left out", {}),
    "never-offload": ("left out", OFFLOAD),
    "weight": ("weight", {"--check-weights-every": 1}),
    "weight-at-save": ("weight", {"--check-weights-every": 0}),
}


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("divergence")
    trainings = {}
    for name, value in DAMAGE.items():
        model = damaged_model(tiny_model, work / f"model-{name}", value)
        # The isolation proof rightly refuses such a model too; here the step has to.
        changes = {"--steps-per-hf-export": 1, "--skip-checks": True}
        trainings[name] = Training(harness.flags(model, tiny_data, work / name, changes))
    for name, (what, changes) in BAD.items():
        often = {"--num-train-steps": 8, "--steps-per-checkpoint": 3, "--steps-per-hf-export": 100}
        words = harness.flags(tiny_model, tiny_data, work / name, {**often, **changes})
        trainings[name] = Training(words, {"BAD": what}, "bad_step")
    # Every update dropped so far, then stopped: there are no moments to save yet.
    words = harness.flags(tiny_model, tiny_data, work / "all dropped", {
        "--num-train-steps": 3, "--on-nonfinite": "skip", "--steps-per-checkpoint": 100,
    })  # fmt: skip
    stopped = [*words, "--stop-after", 2]
    trainings["all dropped"] = Training(stopped, {"BAD": "every gradient"}, "bad_step")
    trainings["all dropped, resumed"] = Training(words)
    results = launch_many(2, list(trainings.values()), work)
    return dict(zip(trainings, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_ends_every_rank_with_1_and_nothing_is_written(
    runs: dict[str, Result], name: str
) -> None:
    run = runs[name]
    assert run.codes == [1, 1]
    assert "error: the loss of step 0 is" in run.text
    assert "weights of model.norm.weight)" in run.text
    assert run.text.count("no weight was changed") == 1
    assert run.rows == []
    assert not list(run.out.glob("hf/*"))
    assert not list(run.out.glob("checkpoints*/*"))
    assert not (run.out / "finished").exists()


@pytest.mark.slow
def test_a_bad_gradient_ends_the_run_with_the_last_good_checkpoint_the_newest(
    runs: dict[str, Result],
) -> None:
    run = runs["gradient-stop"]
    assert run.codes == [1, 1]
    assert (
        "error: the gradient of step 4 is not finite (each pack has a finite loss; grad" in run.text
    )
    assert "gradient of model.embed_tokens.weight, model.layers.0." in run.text
    assert "all weights are finite" in run.text
    assert [row["label"] for row in run.rows] == [0, 1, 2, 3]
    assert labels_in(run.out / "checkpoints") == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("gradient-skip", "never"),
        ("loss-skip", "never"),
        ("gradient-skip-offload", "never-offload"),
    ],
)
def test_a_dropped_update_leaves_no_trace(
    runs: dict[str, Result], name: str, reference: str
) -> None:
    """The reference never computes step 4: weights, moments and Adam's step must be the same."""
    run, never = runs[name], runs[reference]
    assert run.codes == never.codes == [0, 0], run.text[-3000:]
    assert "[nonfinite] the " in run.text
    assert [row["label"] for row in run.rows] == list(range(8))
    dropped = run.rows[4]
    assert "of step 4 is" in dropped["dropped"]
    assert dropped["grad_norm"] is None
    others = [i for i in range(8) if i != 4]
    for column in ("loss", "grad_norm", "lr"):
        got, want = run.column(column), never.column(column)
        assert [got[i] for i in others] == [want[i] for i in others], column
    ours, theirs = (harness.weights(r.out / "hf/step-7") for r in (run, never))
    assert all((ours[n] == theirs[n]).all() for n in theirs)


@pytest.mark.slow
def test_the_packs_with_a_bad_loss_are_named(runs: dict[str, Result]) -> None:
    """Rank 1 of 2 has packs 1 and 3 of each group of 4; the second microbatch was damaged."""
    (line,) = [x for x in runs["loss-skip"].text.splitlines() if x.startswith("[nonfinite]")]
    packs = [(4 * 8 + slot) % 28 for slot in (3,)]
    assert f"the loss of step 4 is nan (packs {packs[0]}; " in line
    assert runs["loss-skip"].rows[4]["loss"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("weight", 4), ("weight-at-save", 7)])
def test_a_weight_that_is_not_finite_is_never_saved(
    runs: dict[str, Result], name: str, rows: int
) -> None:
    run = runs[name]
    assert run.codes == [1, 1]
    assert "weights are not finite (lm_head.weight)" in run.text
    assert labels_in(run.out / "checkpoints") == [3]
    assert len(run.rows) == rows


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_first_update_goes_on(runs: dict[str, Result]) -> None:
    assert runs["all dropped"].codes == [0, 0], runs["all dropped"].text[-3000:]
    resumed = runs["all dropped, resumed"]
    assert resumed.codes == [0, 0], resumed.text[-3000:]
    assert "at step 2" in resumed.text
    assert ["dropped" in row for row in resumed.rows] == [True, True, False]
