"""The 12 training steps that Levanter's own Trainer did, through our launcher, loop and exports.

Also the same curve for every number of ranks and packs per rank, and what bfloat16 changes. Some
runs evaluate on the way, which must not show in their curves. The limits are those of
tests/golden/README.md; what a wrong number would do is in the first test.
"""

from __future__ import annotations

import json
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import Result, Training, launch_many, relative_update_error, weights

TRAJECTORY = json.loads((harness.GOLDEN / "tiny_qwen3_train/trajectory.json").read_text())
PARAMETERS = harness.GOLDEN / "tiny_qwen3_train" / "untied"
PEAK = 0.002
LOSS_LIMIT, LR_LIMIT, NORM_LIMIT, UPDATE_LIMIT = 1e-4, 2e-7, 1e-5, 1e-4
SAME_LOSS, SAME_UPDATE, SAME_WEIGHT = 1e-5, 2e-5, 1e-4
LABELS = (1, 2, 11)  # label 0 changes nothing, and has no export: a test of its own

FLOAT32_EXPORTS = {"--hf-export-dtype": "float32", "--steps-per-hf-export": 100}
EVERY_LABEL = {**FLOAT32_EXPORTS, "--steps-per-hf-export": 1}
# Five packs, which rows of two and two ranks do not divide, and two, too few for three ranks.
VALIDATION = {"five": [3, 27, 9, 14, 0], "two": [5, 20]}
ONE_GROUP = {**FLOAT32_EXPORTS, "--loss-groups": 1}


def golden(name: str) -> list[float]:
    return [step[name] for step in TRAJECTORY["untied"]["steps"]]


def init(kind: str = "untied") -> dict[str, np.ndarray]:
    return weights(harness.GOLDEN / "tiny_qwen3" / kind)


def golden_parameters(label: int) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    loaded = load_file(PARAMETERS / f"params_after_label_{label}.safetensors")
    return {name: tensor.astype(np.float64) for name, tensor in loaded.items()}


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path,
    tiny_tied_model: Path,
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:
    """Every training of this file, by name; one launch for each world size."""
    work = tmp_path_factory.mktemp("golden")
    tight = work / "tight.json"
    tight.write_text(json.dumps(harness.TIGHT))
    pairs = {**FLOAT32_EXPORTS, "--per-device-batch": 2, "--deepspeed-config": tight}
    idle = {**FLOAT32_EXPORTS, "--allow-idle": True}
    five, two = (harness.with_validation(tiny_data, work / name, VALIDATION[name])
                 for name in VALIDATION)  # fmt: skip
    evaluated, few = ({"--data": data, "--eval-every": 5} for data in (five, two))
    wanted: dict[int, dict[str, tuple[Path, dict]]] = {
        1: {
            "1": (tiny_model, {**EVERY_LABEL, **evaluated}),
            "1x2": (tiny_model, pairs),
            "one group": (tiny_model, ONE_GROUP),
            "tied 1": (tiny_tied_model, FLOAT32_EXPORTS),
        },
        2: {
            "2": (tiny_model, EVERY_LABEL),
            "2x2": (tiny_model, {**pairs, **evaluated}),
            "tied": (tiny_tied_model, FLOAT32_EXPORTS),
            "first step": (tiny_model, {**FLOAT32_EXPORTS, "--stop-after": 1}),
            "bf16": (tiny_model, {**FLOAT32_EXPORTS, "--compute-dtype": "bfloat16"}),
        },
        3: {"3": (tiny_model, {**idle, **few}), "3x2": (tiny_model, {**pairs, **idle})},
    }
    results: dict[str, Result] = {}
    for world_size, by_name in wanted.items():
        trainings = [
            Training(harness.flags(model, tiny_data, work / name.replace(" ", "-"), changes))
            for name, (model, changes) in by_name.items()
        ]
        done = launch_many(world_size, trainings, work)
        results |= dict(zip(by_name, done, strict=True))
    for name, result in results.items():
        assert set(result.codes) == {0}, f"{name}: {result.text[-3000:]}"
    return results


def test_the_golden_file_tells_two_loss_groups_from_one() -> None:
    one = TRAJECTORY["untied_ONE_microbatch_of_8 (to show the difference)"]
    apart = np.abs(np.array([s["loss"] for s in one]) - golden("loss"))
    assert apart.max() > 100 * LOSS_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1", "2"])
def test_the_curve_is_levanters(runs: dict[str, Result], name: str) -> None:
    run = runs[name]
    assert run.column("label") == list(range(12))
    np.testing.assert_allclose(run.column("loss"), golden("loss"), rtol=0, atol=LOSS_LIMIT)
    off = np.abs(np.array(run.column("lr")) - golden("lr")) / PEAK
    assert off.max() <= LR_LIMIT
    assert run.column("lr")[0] == 0.0
    norms = run.column("grad_norm")
    np.testing.assert_allclose(norms, golden("grad_norm"), rtol=NORM_LIMIT, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", ["1", "2"])
def test_the_parameters_are_levanters(runs: dict[str, Result], name: str, label: int) -> None:
    got = weights(runs[name].out / "hf" / f"step-{label}")
    assert relative_update_error(got, golden_parameters(label), init()) <= UPDATE_LIMIT


@pytest.mark.slow
def test_label_0_changes_no_parameter_because_its_learning_rate_is_0(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    from ds_sft.run.export import export_offline

    checkpoint = runs["first step"].out / "checkpoints-temp" / "step-0"
    export_offline(checkpoint, tmp_path / "hf", dtype="float32", keep_generation_config=False)
    got, before, levanter = weights(tmp_path / "hf"), init(), golden_parameters(0)
    assert all((got[name] == before[name]).all() for name in before)
    assert all((got[name] == levanter[name]).all() for name in before)


@pytest.mark.slow
def test_one_loss_group_is_another_curve(runs: dict[str, Result]) -> None:
    """The power of the comparison: the smallest wrong recipe lies far outside the limit."""
    apart = np.abs(np.array(runs["one group"].column("loss")) - golden("loss"))
    assert apart.max() > 1e-3
    one = TRAJECTORY["untied_ONE_microbatch_of_8 (to show the difference)"]
    wanted = [step["loss"] for step in one]
    np.testing.assert_allclose(runs["one group"].column("loss"), wanted, rtol=0, atol=LOSS_LIMIT)


@pytest.mark.slow
def test_a_tied_model_has_the_curve_of_plain_torch(
    runs: dict[str, Result], tiny_tied_model: Path, tiny_data: Path
) -> None:
    """Levanter's 12 steps exist for the untied model only: the reference is a loop of its own."""
    losses, parameters = plain_torch_training(tiny_tied_model, tiny_data)
    run = runs["tied"]
    np.testing.assert_allclose(run.column("loss"), losses, rtol=0, atol=LOSS_LIMIT)
    got = weights(run.out / "hf/step-11")
    assert "lm_head.weight" not in got
    assert relative_update_error(got, parameters, init("tied")) <= UPDATE_LIMIT


def plain_torch_training(model_dir: Path, data: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """The golden recipe in one process with torch's own parts: dense mask, autograd, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    arrays = {n: np.load(data / f"{n}.npy") for n in ("tokens", "assistant_mask", "doc_lens")}
    offsets = np.load(data / "pack_offsets.npy")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    named = dict(model.named_parameters())
    plain = [n for n in named if "norm" in n or "embed" in n]
    groups = [
        {"params": [p for n, p in named.items() if n not in plain], "weight_decay": 0.1},
        {"params": [named[n] for n in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8)

    def summed_loss(pack: int) -> tuple[torch.Tensor, int]:
        ids = torch.from_numpy(arrays["tokens"][pack].astype(np.int64))
        mask = torch.from_numpy(arrays["assistant_mask"][pack].astype(bool))[1:]
        lengths = arrays["doc_lens"][offsets[pack] : offsets[pack + 1]].tolist()
        segment = torch.repeat_interleave(
            torch.arange(len(lengths) + 1), torch.tensor([*lengths, len(ids) - sum(lengths)])
        )
        seen = (segment[:, None] == segment[None]).tril()
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        positions = torch.arange(len(ids))[None]
        logits = model(ids[None], attention_mask=bias[None, None], position_ids=positions).logits
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[1:], reduction="none")
        return losses[mask].sum(), int(mask.sum())

    curve = []
    for step, lr in enumerate(golden("lr")):
        optimizer.zero_grad()
        loss_of_step = 0.0
        for group in range(2):
            packs = [(8 * step + 4 * group + i) % len(arrays["tokens"]) for i in range(4)]
            sums, counts = zip(*map(summed_loss, packs), strict=True)
            loss = sum(sums) / sum(counts) / 2
            loss.backward()
            loss_of_step += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group_ in optimizer.param_groups:
            group_["lr"] = lr
        optimizer.step()
        curve.append(loss_of_step)
    return curve, {n: p.detach().double().numpy() for n, p in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base"),
    [("1", "2"), ("1x2", "2"), ("2x2", "2"), ("3", "2"), ("3x2", "2"), ("tied 1", "tied")],
)
def test_the_curve_does_not_depend_on_ranks_and_packs_per_rank(
    runs: dict[str, Result], name: str, base: str
) -> None:
    reference, run = runs[base], runs[name]
    want_loss = reference.column("loss")
    np.testing.assert_allclose(run.column("loss"), want_loss, rtol=0, atol=SAME_LOSS)
    got, want = weights(run.out / "hf/step-11"), weights(reference.out / "hf/step-11")
    start = init("tied" if base == "tied" else "untied")
    assert relative_update_error(got, want, start) <= SAME_UPDATE
    assert max(np.abs(got[n] - want[n]).max() for n in want) <= SAME_WEIGHT
    for column in ("target_tokens", "tokens"):  # idle slots are not counted
        assert run.column(column) == reference.column(column)


@pytest.mark.slow
def test_bfloat16_stays_near_the_float32_curve_and_is_not_it(runs: dict[str, Result]) -> None:
    apart = np.abs(np.array(runs["bf16"].column("loss")) - runs["2"].column("loss"))
    assert 1e-6 < apart.max() <= 2e-2


@pytest.mark.slow
def test_idle_slots_are_said(runs: dict[str, Result]) -> None:
    assert "slots of a step idle" in runs["3x2"].text
    assert "idle" not in runs["2"].text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "labels"),
    [("1", "five", (5, 10, 11)), ("2x2", "five", (11,)), ("3", "two", (11,))],
)
def test_an_evaluation_is_plain_torchs_loss_for_any_split_over_ranks(
    runs: dict[str, Result], name: str, data: str, labels: tuple[int, ...]
) -> None:
    run = runs[name]
    validation = run.out.parent / data / "validation"
    assert list(run.evaluations) == [5, 10, 11]
    tokens = int(np.load(validation / "assistant_counts.npy").sum())
    assert {row["eval/tokens"] for row in run.evaluations.values()} == {tokens}
    for label in labels:
        got = run.evaluations[label]["eval/loss"]
        want = harness.plain_loss(run.out / f"hf/step-{label}", validation)
        assert abs(got - want) <= SAME_LOSS
        assert f"[eval] step-{label} loss={got:.4f} over {tokens:,} tokens" in run.text
