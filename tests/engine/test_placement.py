"""Which JSON needs less of the memory that is short, and what offloaded states take on a host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import ROOT

from ds_sft.engine import host_memory, machine, memory, placement
from ds_sft.engine.config import read_json
from ds_sft.engine.setup import Setup

SHIPPED = ROOT / "ds_configs"


def model(numel: int) -> Any:
    return SimpleNamespace(num_parameters=numel, tensors={"w": ((numel,), "F32")}, tied=False)


def following(folder: Path, name: str, short: placement.Memory) -> str | None:
    path = folder / name
    found = placement.next_json(path, read_json(path), short)
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("name", "short", "after"),
    [
        ("zero3.json", "gpu", "zero3_offload_optimizer.json"),
        ("zero3.json", "host", "zero3_offload_optimizer_nvme.json"),
        ("zero3_offload_optimizer.json", "host", "zero3_offload_optimizer_nvme.json"),
        ("zero3_offload_optimizer_nvme.json", "gpu", "zero3_offload_nvme.json"),
        ("zero3_offload_optimizer_nvme.json", "host", "zero3_offload_nvme.json"),
        ("zero3_offload_nvme.json", "gpu", None),
        ("zero3_offload_nvme.json", "host", None),
    ],
)
def test_the_next_shipped_json_needs_less_of_what_is_short(
    name: str, short: placement.Memory, after: str | None
) -> None:
    assert following(SHIPPED, name, short) == after


@pytest.mark.parametrize("short", ["gpu", "host"])
def test_every_way_ends_and_never_moves_anything_back(short: placement.Memory) -> None:
    for start in SHIPPED.glob("*.json"):
        path: Path | None = start
        seen: list[tuple[str, str]] = []
        while path is not None:
            config = read_json(path)
            seen.append(placement.devices(config))
            path = placement.next_json(path, config, short)
        far = {"none": 0, "cpu": 1, "nvme": 2}
        sums = [far[optimizer] + far[parameters] for optimizer, parameters in seen]
        assert sums == sorted(set(sums)), seen


def test_files_are_known_by_what_they_say(tmp_path: Path) -> None:
    shutil.copy(SHIPPED / "zero3.json", tmp_path / "mine.json")
    assert following(tmp_path, "mine.json", "gpu") is None
    shutil.copy(SHIPPED / "zero3_offload_optimizer.json", tmp_path / "z.json")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "odd.json").write_text('{"zero_optimization": 3}')
    (tmp_path / "odder.json").write_text('{"zero_optimization": {"offload_param": 3}}')
    (tmp_path / "notes.json").write_text('{"a": 1}')
    assert following(tmp_path, "mine.json", "gpu") == "z.json"


def config(**zero: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}


CPU = {"device": "cpu", "pin_memory": False}
PINNED = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "pin_memory": False}


@pytest.mark.parametrize(
    ("values", "ranks", "world_size", "expected"),
    [
        (config(), 1, 1, 0),
        (config(offload_optimizer=CPU), 1, 1, 20_000),
        # The sum of gradients and the copy that Adam reads, each in a power of two.
        (config(offload_optimizer=PINNED), 1, 1, 20_000 + 2 * 96),
        (config(offload_optimizer=CPU), 2, 4, 10_000),  # half of the ranks are elsewhere
        (config(offload_optimizer=CPU, offload_param=CPU), 1, 1, 22_000 + 48),
        ({**config(offload_param=CPU), "bf16": {"enabled": False}}, 1, 1, 4_000 + 96),
        (config(offload_optimizer=NVME, sub_group_size=100), 4, 4,
         4 * (1_000 + 4 * 4 * 250)),  # a sub-group ends after the tensor that fills it
        (config(offload_optimizer={**NVME, "buffer_count": 8}), 1, 1,
         4_000 + 8 * 1000 * 4),  # no sub-group is larger than what the rank has
        (config(offload_param={"device": "nvme", "buffer_count": 5, "buffer_size": 70}), 1, 1,
         5 * 70 * 2),
    ],
)  # fmt: skip
def test_host_memory_is_that_of_the_ranks_of_this_host(
    values: dict[str, Any], ranks: int, world_size: int, expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert placement.host_bytes(values, model(1000), world_size) == expected


def test_too_little_host_memory_is_said_with_the_json_that_needs_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: (20 * 10**9, "container"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    path = SHIPPED / "zero3_offload_optimizer.json"
    values = json.loads(path.read_text())
    assert placement.note_host_memory(path, values, model(700_000_000), 1) == ""
    said = placement.note_host_memory(path, values, model(10**9), 1)
    assert said.startswith(
        "warning: offloading takes 20.6 GB of host memory (ranks of this host: 1), the container "
        "has 20.0 GB: "
    )
    assert said.endswith("use " + str(SHIPPED / "zero3_offload_optimizer_nvme.json"))


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.glob("*.json")))
def test_the_start_of_a_run_counts_what_fit_counts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    values = {**read_json(SHIPPED / name), "bf16": {"enabled": True}}
    sizes = Setup(
        numels={"w": 10**9}, tied=False, world_size=4, gpus_per_node=2, compute_bytes=2,
        reduce_bytes=4,
    )  # fmt: skip
    zero = {**memory.DEFAULTS, **values["zero_optimization"]}
    one = host_memory.of_rank(sizes, zero)
    assert placement.host_bytes(values, model(10**9), 4) == 2 * (one.states + one.buffers)


def test_with_apollo_the_moments_are_few_and_swapping_is_no_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: (20 * 10**9, "container"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    path = SHIPPED / "zero3_offload_optimizer.json"
    values = json.loads(path.read_text())
    adamw = placement.host_bytes(values, model(1000), 1)
    assert placement.host_bytes(values, model(1000), 1, moments=10) == adamw - 8 * (1000 - 10)
    assert placement.note_host_memory(path, values, model(10**9), 1) != ""
    assert placement.note_host_memory(path, values, model(10**9), 1, moments=10**8) == ""
    said = placement.note_host_memory(path, values, model(3 * 10**9), 1, moments=10**8)
    assert said.endswith("the container has 20.0 GB")
