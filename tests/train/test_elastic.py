"""A run goes on with another number of ranks, and another offload, on the same curve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
from harness import Result, Training, launch_many, relative_update_error, weights

from ds_sft.run.native import MASTERS, MOMENTS, NativeCheckpoint
from ds_sft.run.reshard import convert
from ds_sft.run.verify import verify

pytestmark = pytest.mark.slow
OFFLOAD = harness.ROOT / "ds_configs/zero3_offload_optimizer.json"
CHANGES = {"--hf-export-dtype": "float32", "--allow-idle": True}


@pytest.fixture(scope="module")
def small_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON with many sub-groups, offloaded, and no parameter that stays whole."""
    config = json.loads(OFFLOAD.read_text())
    config["zero_optimization"] |= {"sub_group_size": 9000, "stage3_param_persistence_threshold": 0}
    path = tmp_path_factory.mktemp("json") / "small.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, small_groups: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """`straight` on 2 ranks; the others stop after 5 steps there and go on elsewhere.

    `chain` is 2 -> 1 -> 3 -> 2 ranks, three steps on each, with another offload in between.
    """
    work = tmp_path_factory.mktemp("elastic")

    def training(out: str, changes: dict) -> Training:
        return Training(harness.flags(tiny_model, tiny_data, work / out, {**CHANGES, **changes}))

    def chain(stop_after: int, **changes: object) -> Training:
        return training("chain", {"--stop-after": stop_after, **changes})

    begun = [training("straight", {}), training("one", {"--stop-after": 5}), chain(3)]
    started = launch_many(2, begun, work)
    for other in ("three", "two"):
        shutil.copytree(work / "one", work / other)
    grouped = {"--deepspeed-config": small_groups}
    one, on_one = launch_many(1, [training("one", {}), chain(6)], work)
    three, on_three = launch_many(3, [training("three", grouped), chain(9, **grouped)], work)
    two, back = launch_many(2, [training("two", grouped), training("chain", {})], work)
    results = {"straight": started[0], "one": one, "three": three, "two": two, "chain": back}
    results |= {"chain on 2": started[2], "chain on 1": on_one, "chain on 3": on_three}
    for name, result in results.items():
        assert set(result.codes) == {0}, f"{name}: {result.text[-3000:]}"
    return results


@pytest.mark.parametrize("name", ["one", "three", "two", "chain"])
def test_the_run_after_the_change_follows_the_unchanged_run(
    name: str, runs: dict[str, Result], tiny_model: Path
) -> None:
    changed, straight = runs[name], runs["straight"]
    assert changed.column("label") == list(range(12))
    for column, limit in (("lr", 0.0), ("target_tokens", 0), ("loss", 1e-5)):
        got, want = changed.column(column), straight.column(column)
        np.testing.assert_allclose(got, want, rtol=0, atol=limit)
    got, want = (weights(run.out / "hf/step-11") for run in (changed, straight))
    assert relative_update_error(got, want, weights(tiny_model)) <= 2e-5


def test_what_is_loaded_is_said(runs: dict[str, Result]) -> None:
    assert "was written by 2 ranks, 3 read it" in runs["three"].text
    assert "read it" not in runs["two"].text
    for name, words in {
        "chain on 1": ("written by 2 ranks, 1 read it", "step-2 at step 3"),
        "chain on 3": ("written by 1 ranks, 3 read it", "step-5 at step 6"),
        "chain": ("written by 3 ranks, 2 read it", "step-8 at step 9"),
    }.items():
        assert all(part in runs[name].text for part in words), runs[name].text[-2000:]


def test_a_converted_checkpoint_is_whole_and_holds_the_same_values(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    source, there, back = runs["three"].out / "checkpoints/step-11", tmp_path / "a", tmp_path / "b"
    convert(source, there, 5)
    convert(there, back, 3)
    assert "5 ranks" in "".join(verify(there))
    first, second, third = (NativeCheckpoint.open(path) for path in (source, there, back))
    assert (second.world_size, third.world_size, third.adam_step) == (5, 3, 12)
    for kind in (MASTERS, *MOMENTS):
        for name in first.shapes:
            whole = torch.cat(list(first.pieces(name, kind)))
            assert torch.equal(torch.cat(list(second.pieces(name, kind))), whole)
            assert torch.equal(torch.cat(list(third.pieces(name, kind))), whole)


def test_moments_without_the_adam_step_would_be_seen(runs: dict[str, Result]) -> None:
    """The bias correction at step 5 moves the curve by far more than the limit above."""
    step = 5
    assert (1 - 0.999**step) ** 0.5 / (1 - 0.9**step) > 0.1
    final = NativeCheckpoint.open(runs["three"].out / "checkpoints/step-11")
    assert final.adam_step == 12


def test_parts_of_any_world_size_join_to_the_whole_parameter(runs: dict[str, Result]) -> None:
    native = NativeCheckpoint.open(runs["three"].out / "checkpoints/step-11")
    assert native.world_size == 3
    for kind in (MASTERS, *MOMENTS):
        for name, shape in native.shapes.items():
            whole = torch.cat(list(native.pieces(name, kind)))
            count = int(np.prod(shape))
            assert whole.numel() == count
            for ranks in (1, 2, 5):
                size = -(-count // ranks)
                parts = [native.part(name, rank * size, size, kind) for rank in range(ranks)]
                joined = torch.cat(parts)
                assert torch.equal(joined[:count], whole)
                assert not joined[count:].any()
