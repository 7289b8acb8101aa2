"""APOLLO under ZeRO-3: real runs against a loop in plain torch, stopped and moved between ranks.

The update alone, in any cut of a matrix on 1, 2 and 3 ranks, is test_apollo_slices. The reference
below shares no code with ds_sft: it is written from the paper's formulas, with whole gradients in
one process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from harness import Result, Training, launch_many, relative_update_error, weights

from ds_sft.data.model_files import read_model
from ds_sft.engine.apollo import NORM, PROJECTED
from ds_sft.recipe import low_rank
from ds_sft.run.native import MASTERS, MOMENTS, NativeCheckpoint, load_states, rank_files
from ds_sft.run.reshard import convert
from ds_sft.run.verify import verify

pytestmark = pytest.mark.slow
STEPS, SHORT, BATCH, RANK, GAP = 20, 6, 4, 8, 6
SAME_LOSS, SAME_UPDATE = 1e-5, 2e-5
OFFLOAD = harness.ROOT / "ds_configs/zero3_offload_optimizer.json"
APOLLO = {
    "--optimizer": "apollo", "--apollo-rank": RANK, "--apollo-update-proj-gap": GAP,
    "--num-train-steps": STEPS, "--hf-export-dtype": "float32", "--steps-per-hf-export": 100,
    "--train-batch-size": BATCH, "--allow-idle": True, "--trainer-seed": 3,
}  # fmt: skip
BAD = {"--num-train-steps": SHORT}
MINI = {**APOLLO, "--optimizer": "apollo-mini", "--apollo-rank": None}


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_tied_model: Path, tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:  # fmt: skip
    """Every training of this file, by name, on 2 ranks where nothing else is said.

    `chain` is 2 -> 1 -> 3 ranks, in its last part from a converted checkpoint. Runs stop where the
    next step has a new projection.
    """
    work = tmp_path_factory.mktemp("apollo")
    groups = work / "small_groups.json"
    config = json.loads(OFFLOAD.read_text())
    config["zero_optimization"] |= {"sub_group_size": 9000, "stage3_param_persistence_threshold": 0}
    groups.write_text(json.dumps(config))
    grouped = {"--deepspeed-config": groups}
    of_two, of_one = (work / f"{name}/checkpoints-temp" for name in ("again", "chain-on-1"))

    def training(
        name: str, changes: dict[str, Any], model: Path = tiny_model, ranks: int = 2,
        module: str = "ds_sft.train", **env: str,
    ) -> Training:  # fmt: skip
        words = harness.flags(model, tiny_data, work / name, {**APOLLO, **changes})
        return Training(words, env, module, ranks)

    wanted = {
        "2": training("2", {}),
        "stopped": training("again", {"--stop-after": GAP}),
        "chain on 1": training(
            "chain-on-1", {"--stop-after": 2 * GAP, "--resume": of_two / f"step-{GAP - 1}"},
            ranks=1,
        ),
        "again": training("again", {}),
        "mini": training("mini", {**MINI, **grouped}, tiny_tied_model),
        "bf16": training("bf16", {"--compute-dtype": "bfloat16", "--stop-after": SHORT}),
        "skipped": training(
            "skipped", {**BAD, "--on-nonfinite": "skip"}, module="bad_step", BAD="gradient"
        ),
        "left out": training("left-out", BAD, module="bad_step", BAD="left out"),
        "memory": training("memory", {}, ranks=3, module="memory_worker"),
    }  # fmt: skip
    results = dict(zip(wanted, launch_many(2, [*wanted.values()], work), strict=True))
    convert(of_one / f"step-{2 * GAP - 1}", work / "converted", 3)
    last = training("chain", {**grouped, "--resume": work / "converted"}, ranks=3)
    results["chain"] = launch_many(3, [last], work)[0]
    for name, result in results.items():
        assert set(result.codes) == {0}, f"{name}: {result.text[-3000:]}"
    return results


@dataclass
class Plain:
    """One parameter of the reference."""

    index: int
    weight: torch.nn.Parameter
    decay: float
    low_rank: bool
    m: Any = 0.0
    v: Any = 0.0
    norm: float = 0.0

    def update(self, t: int, lr: float, *, rank: int, scale: float, mini: bool) -> None:
        """The `t`-th update, from 1."""
        g = self.weight.grad.double()
        correction = (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        if not self.low_rank:
            self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g**2
            update = self.m / (self.v.sqrt() + 1e-8 * (1 - 0.999**t) ** 0.5)
        else:
            tall = g.shape[0] >= g.shape[1]
            p = self.projection((t - 1) // GAP, rank).double()  # [smaller dimension, rank]
            r = g @ p if tall else p.T @ g
            self.m, self.v = 0.9 * self.m + 0.1 * r, 0.999 * self.v + 0.001 * r**2
            n = self.m / (self.v.sqrt() + 1e-8)
            along = 1 if tall else 0
            s = n.norm(dim=along, keepdim=True) / (r.norm(dim=along, keepdim=True) + 1e-8)
            if mini:
                s = n.norm() / (r.norm() + 1e-8) * scale**0.5
            update = g * s
            norm = update.norm().item()
            if t > 1:
                update /= max(1.0, norm / (1.01 * self.norm))
            self.norm = update.norm().item()
            update *= 1.0 if mini else scale**0.5
        with torch.no_grad():
            self.weight -= (lr * self.decay * self.weight.double()).float()
            self.weight -= (lr * correction * update).float()

    def projection(self, number: int, rank: int) -> torch.Tensor:
        """Written down once more: a change of the draw changes every curve."""
        seed = np.random.SeedSequence((3, self.index, number)).generate_state(1, np.uint32)[0]
        generator = torch.Generator().manual_seed(int(seed))
        return torch.randn(min(self.weight.shape), rank, generator=generator) / rank**0.5


def plain_training(
    directory: Path, data: Path, rates: list[float], *, rank: int, scale: float, mini: bool = False
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final parameters of the golden recipe with this optimizer, in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    named = dict(model.named_parameters())
    parameters = []
    for index, (name, weight) in enumerate(named.items()):
        plain = "norm" in name or "embed" in name
        linear = ".layers." in name and not plain
        parameters.append(Plain(index, weight, 0.0 if plain else 0.1, linear))
    arrays = {n: np.load(data / f"{n}.npy") for n in ("tokens", "assistant_mask", "doc_lens")}
    offsets = np.load(data / "pack_offsets.npy")
    losses = []
    for step, lr in enumerate(rates):
        model.zero_grad()
        total = 0.0
        for group in range(2):
            first = BATCH * step + BATCH // 2 * group
            packs = [(first + i) % len(arrays["tokens"]) for i in range(BATCH // 2)]
            sums, counts = zip(*(one_pack(model, arrays, offsets, p) for p in packs), strict=True)
            loss = sum(sums) / sum(counts) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in parameters:
            parameter.update(step + 1, lr, rank=rank, scale=scale, mini=mini)
        losses.append(total)
    return losses, {n: p.detach().double().numpy() for n, p in named.items()}


def one_pack(
    model: Any, arrays: dict[str, np.ndarray], offsets: np.ndarray, pack: int
) -> tuple[torch.Tensor, int]:
    """Summed loss of the trained tokens of a pack, and how many these are; a dense mask."""
    ids = torch.from_numpy(arrays["tokens"][pack].astype(np.int64))
    mask = torch.from_numpy(arrays["assistant_mask"][pack].astype(bool))[1:]
    lengths = arrays["doc_lens"][offsets[pack] : offsets[pack + 1]].tolist()
    lengths.append(len(ids) - sum(lengths))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (segment[:, None] == segment[None]).tril()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    positions = torch.arange(len(ids))[None]
    logits = model(ids[None], attention_mask=bias[None, None], position_ids=positions).logits
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[1:], reduction="none")
    return losses[mask].sum(), int(mask.sum())


@pytest.fixture(scope="module")
def reference(
    runs: dict[str, Result], tiny_model: Path, tiny_data: Path
) -> tuple[list[float], dict[str, np.ndarray]]:
    rates = runs["2"].column("lr")
    return plain_training(tiny_model, tiny_data, rates, rank=RANK, scale=1.0)


@pytest.mark.parametrize("name", ["2", "again", "chain on 1", "chain"])
def test_any_number_of_ranks_any_offload_and_any_interruption_is_the_plain_loop(
    runs: dict[str, Result], reference: Any, tiny_model: Path, name: str
) -> None:
    losses, parameters = reference
    labels = runs[name].column("label")
    first, end = {"chain on 1": (GAP, 2 * GAP), "chain": (2 * GAP, STEPS)}.get(name, (0, STEPS))
    assert labels == list(range(first, end))
    here = runs[name].column("loss")
    np.testing.assert_allclose(here, losses[first:end], rtol=0, atol=SAME_LOSS)
    assert min(runs[name].column("grad_norm")) > 1.0  # clipping is at work
    if end < STEPS:
        return
    got = weights(runs[name].out / f"hf/step-{STEPS - 1}")
    assert relative_update_error(got, parameters, weights(tiny_model)) <= SAME_UPDATE


def test_mini_on_a_tied_model_is_the_plain_loop(
    runs: dict[str, Result], tiny_tied_model: Path, tiny_data: Path
) -> None:
    run = runs["mini"]
    rates = run.column("lr")
    losses, parameters = plain_training(
        tiny_tied_model, tiny_data, rates, rank=1, scale=128.0, mini=True
    )
    np.testing.assert_allclose(run.column("loss"), losses, rtol=0, atol=SAME_LOSS)
    got = weights(run.out / f"hf/step-{STEPS - 1}")
    assert relative_update_error(got, parameters, weights(tiny_tied_model)) <= SAME_UPDATE
    assert "... embedding: 1 tensors" in run.text
    assert "... head" not in run.text


def test_a_wrong_scale_would_be_seen(
    runs: dict[str, Result], tiny_model: Path, tiny_data: Path
) -> None:
    rates = runs["2"].column("lr")
    _, parameters = plain_training(tiny_model, tiny_data, rates, rank=RANK, scale=1.01)
    got = weights(runs["2"].out / f"hf/step-{STEPS - 1}")
    assert relative_update_error(got, parameters, weights(tiny_model)) > 20 * SAME_UPDATE


def test_a_resumed_run_is_bit_identical(runs: dict[str, Result]) -> None:
    straight, again = (runs[name].out / "checkpoints/step-19" for name in ("2", "again"))
    assert f"at step {GAP}" in runs["again"].text
    assert "resumed from" in runs["chain on 1"].text
    for one, two in zip(*(rank_files(path, "optim", 2) for path in (straight, again)), strict=True):
        assert same(load_states(one), load_states(two)), one.name
    one, two = (weights(runs[name].out / f"hf/step-{STEPS - 1}") for name in ("2", "again"))
    assert all((one[name] == two[name]).all() for name in one)
    assert runs["2"].column("loss") == runs["again"].column("loss")


def same(one: Any, two: Any) -> bool:
    """Whether two trees of tensors and values are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) if type(one).__module__.startswith("deepspeed") else one == two


def test_the_state_of_a_dropped_update_is_that_of_a_step_which_never_was(
    runs: dict[str, Result],
) -> None:
    skipped, never = runs["skipped"], runs["left out"]
    assert "dropped" in skipped.rows[4]
    one, two = (load_optimizers(run.out / "checkpoints/step-5", 2) for run in (skipped, never))
    assert same(one, two)
    assert one[0][0]["step"] == SHORT - 1
    assert float(one[0][0][NORM].min()) > 0


def load_optimizers(checkpoint: Path, ranks: int) -> list[dict[int, Any]]:
    """State of each rank's sub-groups."""
    files = rank_files(checkpoint, "optim", ranks)
    return [load_states(f)["optimizer_state_dict"]["optimizer_state_dict"]["state"] for f in files]


def test_a_checkpoint_holds_the_state_in_its_own_kinds_for_any_number_of_ranks(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    source, there, back = runs["chain"].out / "checkpoints/step-19", tmp_path / "5", tmp_path / "3"
    convert(source, there, 5)
    convert(there, back, 3)
    assert "complete, finite" in "".join(verify(there))
    first, second, third = (NativeCheckpoint.open(path) for path in (source, there, back))
    assert len(first.low_rank) == 14
    assert first.norms == second.norms == third.norms
    for name in first.shapes:
        assert first.moments(name) == (PROJECTED if name in first.low_rank else MOMENTS)
        for kind in (MASTERS, *first.moments(name)):
            whole = torch.cat(list(first.pieces(name, kind)))
            if kind in PROJECTED:
                assert whole.numel() == max(first.shapes[name]) * RANK
            assert torch.equal(torch.cat(list(second.pieces(name, kind))), whole)
            assert torch.equal(torch.cat(list(third.pieces(name, kind))), whole)


def test_the_state_has_the_bytes_of_the_formula(runs: dict[str, Result], tiny_model: Path) -> None:
    """Counted by storage in memory_worker, on the live tensors of 3 ranks, which pad."""
    tensors, ranks = low_rank.by_name(read_model(tiny_model).shapes), 3
    masters = 4 * sum(-(-t.numel // ranks) for t in tensors.values())
    state = low_rank.state_bytes(tensors, RANK, ranks)
    for rank in range(ranks):
        held = json.loads(Path(f"{runs['memory'].out}.rank{rank}.json").read_text())
        assert held["optimizer"] == masters + state
    assert f"moments of a rank: {state:,} bytes" in runs["memory"].text


def test_bfloat16_computes_on_the_same_curve(runs: dict[str, Result]) -> None:
    apart = np.abs(np.array(runs["bf16"].column("loss")) - runs["2"].column("loss")[:SHORT])
    assert 1e-6 < apart.max() <= 3e-2


def test_the_run_says_that_it_leaves_levanters_curve_and_who_goes_which_way(
    runs: dict[str, Result],
) -> None:
    text = runs["2"].text
    assert "NOT LEVANTER'S CURVE: the optimizer is apollo" in text
    assert f"rank {RANK}, scale 1, one factor a channel, a new projection every {GAP}" in text
    assert "low-rank moments: 14 tensors, 110,592 parameters" in text
    recipe = json.loads((runs["mini"].out / "run.json").read_text())["recipe"]
    assert (recipe["optimizer"], recipe["apollo_rank"], recipe["apollo_scale"]) == (
        "apollo-mini", 1, 128.0
    )  # fmt: skip
