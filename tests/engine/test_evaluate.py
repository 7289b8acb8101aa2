"""One evaluation, with an engine that only looks: modes, autograd, the mean, stopping."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sft.data.packed import PackedDataset
from ds_sft.engine import evaluate as module
from ds_sft.engine.evaluate import EvalResult, evaluate
from ds_sft.model.sft import DeviceBatch
from ds_sft.recipe.batching import EvalPlan


class Engine:
    """A loss of 2 per target; fails where a real engine would compute gradients or dropout."""

    device = torch.device("cpu")

    def __init__(self, fail_at: int = -1) -> None:
        self.module = SimpleNamespace(training=True)
        self.calls, self.fail_at = 0, fail_at

    def eval(self) -> None:
        self.train(False)

    def train(self, mode: bool = True) -> None:
        self.module.training = mode

    def __call__(self, batch: DeviceBatch) -> torch.Tensor:
        assert not self.module.training
        assert not torch.is_grad_enabled()
        if self.calls == self.fail_at:
            raise MemoryError
        self.calls += 1
        return torch.tensor(2.0 * batch.labels.numel())


@pytest.fixture
def run(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    data = PackedDataset.open(tiny_data)
    shares: list[torch.Tensor] = []

    def evaluated(
        engine: Engine, rank: int = 0, world_size: int = 1, **kwargs: Any
    ) -> EvalResult | None:
        monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(module.dist, "all_reduce", lambda totals: shares.append(totals.clone()))
        batches = EvalPlan(num_packs=data.num_packs, world_size=world_size, per_device_batch=3)
        return evaluate(engine, data, batches, **kwargs)

    evaluated.data, evaluated.shares = data, shares  # type: ignore[attr-defined]
    return evaluated


def test_the_engine_is_in_eval_mode_inside_and_in_its_old_mode_after(run: Any) -> None:
    engine = Engine()
    result = run(engine)
    assert result.loss == 2.0
    assert engine.calls == 10  # 28 packs in threes
    assert engine.module.training
    engine.module.training = False
    run(engine)
    assert not engine.module.training


def test_a_stop_leaves_no_result_and_the_old_mode(run: Any) -> None:
    engine = Engine()
    asked: list[int] = []

    def stop() -> bool:
        asked.append(engine.calls)
        return engine.calls == 4

    assert run(engine, stop=stop) is None
    assert asked == [0, 1, 2, 3, 4]
    assert engine.module.training


def test_an_error_inside_leaves_the_old_mode(run: Any) -> None:
    engine = Engine(fail_at=2)
    with pytest.raises(MemoryError):
        run(engine)
    assert engine.module.training


@pytest.mark.parametrize("world_size", [1, 3, 4, 40])
def test_the_shares_of_all_ranks_are_the_whole_set(run: Any, world_size: int) -> None:
    """28 packs in threes: for 40 ranks most have none of their own, and still take part."""
    seen: list[tuple[int, int]] = []
    for rank in range(world_size):
        run(Engine(), rank, world_size, progress=lambda *at: seen.append(at))
    tokens = int(run.data.assistant_counts.sum())
    assert torch.stack(run.shares).sum(0).tolist() == [2.0 * tokens, tokens]
    num_micro = -(-28 // (3 * world_size))
    assert seen == [(n + 1, num_micro) for n in range(num_micro)] * world_size


def test_a_set_without_any_token_has_no_loss(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan refuses it; a mask that does not fit its counts must not end the training."""
    result = run(Engine(), rank=39, world_size=40)
    assert math.isnan(result.loss)
    assert result.target_tokens == 0
