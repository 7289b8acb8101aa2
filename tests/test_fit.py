"""`ds-sft fit`: its answers are true of its own arithmetic, and bad questions end in one line."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import ROOT

from ds_sft import cli, fit_machine, fit_view
from ds_sft.engine import memory, rates
from ds_sft.engine.config import engine_config, read_json
from ds_sft.engine.machine import memory_limit
from ds_sft.errors import ConfigError
from ds_sft.fit import model_of, question_about, read_configs
from ds_sft.fit_machine import parse_size
from ds_sft.fit_question import FitFlags, Machine, Question
from ds_sft.fit_rows import advice, compare, fitting, other_layers, shortages, usable
from ds_sft.flags import parse_flags
from ds_sft.recipe import low_rank
from ds_sft.recipe.named import RECIPES

GIB = memory.GIB
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
SHIPPED = ROOT / "ds_configs"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-1.7B as its config.json alone."""
    path = tmp_path_factory.mktemp("config-only")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def question(model_dir: Path) -> Question:
    flags = FitFlags(model_id=str(model_dir), configs=SHIPPED)
    return question_about(model_of(str(model_dir)), flags)


def shipped(question: Question) -> dict[str, dict[str, Any]]:
    """The shipped files that run on the question's number of ranks."""
    return usable(question, read_configs(SHIPPED))[0]


def rows_of(question: Question, gpu: float, host: float = 128, nvme: float | None = None) -> Any:
    machine = Machine(
        gpu_memory=int(gpu * GIB), host_memory=int(host * GIB),
        nvme=None if nvme is None else int(nvme * GIB),
    )  # fmt: skip
    speeds = rates.assumed(machine.gpu_memory, several_nodes=False)
    return machine, speeds, compare(question, shipped(question), machine, speeds)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    try:
        cli.main(["fit", *map(str, words)])
        code = 0
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_disk_may_be_called_nvme_alone() -> None:
    words = ["--model-id", "m", "--nvme", "/mnt/nvme"]
    assert parse_flags(FitFlags, words, "ds-sft fit").nvme_path == Path("/mnt/nvme")


def test_the_model_without_weights_is_the_one_that_transformers_builds() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ds_sft.data.architectures import expected_shapes

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    built.tie_weights()
    shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
    assert shapes == expected_shapes(CONFIG, tied=True)


def test_a_directory_with_weights_gives_the_shapes_of_its_files(tiny_model: Path) -> None:
    from ds_sft.fit import without_weights

    with_weights, without = model_of(str(tiny_model)), without_weights(tiny_model)
    assert {n: s for n, (s, _) in with_weights.tensors.items()} == {
        n: s for n, (s, _) in without.tensors.items()
    }


def test_what_fits_comes_first_and_the_fastest_on_top(question: Question) -> None:
    _, _, rows = rows_of(question, gpu=24, nvme=1000)
    fits = [row for row in rows if not row.short]
    assert rows[: len(fits)] == fits
    assert [r.seconds.total for r in fits] == sorted(r.seconds.total for r in fits)
    assert {row.name for row in rows} == shipped(question).keys()


def test_a_row_fits_exactly_when_nothing_is_too_small(question: Question) -> None:
    _, _, rows = rows_of(question, gpu=24, nvme=1000)
    need = rows[0].need
    enough = Machine(gpu_memory=need.gpu.total, host_memory=need.host, nvme=need.nvme)
    assert shortages(need, enough) == []
    for name, kind in (("gpu_memory", "gpu"), ("host_memory", "host")):
        less = replace(enough, **{name: getattr(enough, name) - 1})
        assert [k for _, k in shortages(need, less)] == [kind]


def test_the_advice_is_true(question: Question) -> None:
    """Every length and number of GPUs that is named fits, and the one before it does not."""
    seen = set()
    for gpu in (8, 12, 24):
        machine, _, rows = rows_of(question, gpu=gpu, host=64, nvme=1000)
        jsons = shipped(question)
        for row in rows:
            for words in row.advice:
                value = jsons[row.name]
                if words.startswith("--max-seq-len "):
                    length = int(words.split()[1])
                    assert not shortages(question.need(value, row.name, length=length), machine)
                    seen.add("length")
                elif words.endswith(" GPUs"):
                    world = int(words.split()[0])
                    need = question.need(value, row.name, world_size=world)
                    assert not shortages(need, machine)
                    if world > 2:
                        need = question.need(value, row.name, world_size=world // 2)
                        assert shortages(need, machine)
                    seen.add("GPUs")
            assert bool(row.short) == bool(row.advice)
    assert seen == {"length", "GPUs"}


def test_a_gpu_that_is_a_little_too_small_is_told_of_layers_that_hold_less(
    question: Question,
) -> None:
    name = "zero3_offload_optimizer"
    value = shipped(question)[name]
    needs = {words: again.need(value, name) for words, again in other_layers(question)}
    assert list(needs) == ["--mlp-tiles auto", "--offload-activations",
                           "--mlp-tiles auto --offload-activations"]  # fmt: skip
    totals = {words: need.gpu.total for words, need in needs.items()}
    moved = totals["--offload-activations"]
    assert moved < question.need(value, name).gpu.total == totals["--mlp-tiles auto"]  # in the head
    for gpu, words in ((moved, "--offload-activations"), (min(totals.values()) - 1, None)):
        machine = Machine(gpu_memory=gpu, host_memory=1 << 50, nvme=None)
        said = [w for w in advice(question, name, value, machine) if w in needs]
        fits = [w for w, need in needs.items() if need.gpu.total <= gpu]
        assert said == fits[:1]
        assert said == ([] if words is None else [words])


def test_layers_that_keep_everything_are_told_to_recompute_first(question: Question) -> None:
    flags = replace(question.flags, recompute_every=0)
    asked: list[FitFlags] = []

    def remeasure(changed: FitFlags) -> Any:
        asked.append(changed)
        return question.activations

    keeping = replace(question, flags=flags, remeasure=remeasure)
    assert [words for words, _ in other_layers(keeping)] == [
        "--recompute-every 1", "--mlp-tiles auto",
        "--recompute-every 1 --mlp-tiles auto --offload-activations",
    ]  # fmt: skip
    assert (asked[-1].recompute_every, asked[-1].offload_activations) == (1, True)
    nothing_left = replace(flags, recompute_every=1, mlp_tiles=4, offload_activations=True)
    assert list(other_layers(replace(keeping, flags=nothing_left))) == []


def test_what_is_written_fits_where_the_shipped_file_does_not(question: Question) -> None:
    _, _, rows = rows_of(question, gpu=24, nvme=1000)
    needs = [row.need.gpu.total for row in rows]
    found = []
    for gpu in range(4, 25):
        machine, speeds, _ = rows_of(question, gpu=gpu, nvme=1000)
        best = fitting(question, shipped(question), machine, speeds)
        if best is not None:
            name, value = best
            assert not shortages(question.need(value, name), machine)
            found.append((gpu, name))
    assert found
    assert found[0][0] <= math.ceil(min(needs) / GIB)


def test_a_longer_row_and_more_packs_need_more(question: Question) -> None:
    value = read_configs(SHIPPED)["zero3_offload_optimizer"]
    need = [question.need(value, "x", length=n).gpu.total for n in (2048, 8192, 32768)]
    assert need == sorted(need)
    assert need[0] < need[2]


def test_the_table_says_every_file_the_answer_and_what_it_assumes(
    model_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--model-id", model_dir, "--gpu-memory", "24GiB", "--host-memory", "128GiB")
    written = tmp_path / "my.json"
    code, out, err = run(capsys, *words, "--configs", SHIPPED, "--write", written)
    assert (code, err) == (0, "")
    for path in SHIPPED.glob("*.json"):
        assert path.stem in out
    assert "Fastest that fits: zero3_offload_optimizer" in out
    assert "assumed: " in out
    assert "would fit with" in out
    config = engine_config(
        read_json(written), written, RECIPES["qwen3-1.7b"], world_size=1, per_device_batch=1
    )
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_json_says_the_same_and_adds_up(
    model_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--model-id", model_dir, "--gpu-memory", "10GiB", "--host-memory", "128GiB")
    code, out, _ = run(
        capsys, *words, "--configs", SHIPPED, "--nvme-path", tmp_path, "--json",
        "--max-seq-len", 16384,
    )  # fmt: skip
    said = json.loads(out)
    assert code == 0
    assert said["fastest"] == next(r["name"] for r in said["configurations"] if r["fits"])
    for entry in said["configurations"]:
        gpu = {k: v for k, v in entry["gpu"].items() if k not in ("phase", "total")}
        assert sum(gpu.values()) == entry["gpu"]["total"]
        assert entry["fits"] == (entry["lacks"] == [])


def test_nothing_fits_is_an_answer_and_nothing_to_write_an_error(
    model_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--model-id", model_dir, "--gpu-memory", "2GiB", "--host-memory", "128GiB",
             "--configs", SHIPPED)  # fmt: skip
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "Nothing fits as asked" in out
    code, _, err = run(capsys, *words, "--write", tmp_path / "my.json")
    assert code == 2
    assert "no file of" in err
    assert not (tmp_path / "my.json").exists()


def test_masters_and_moments_in_bfloat16_need_less_where_deepspeed_can(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model-id", model_dir, "--gpu-memory", "80GiB", "--host-memory", "128GiB",
             "--configs", SHIPPED, "--max-seq-len", 2048, "--json")  # fmt: skip
    plain = json.loads(run(capsys, *words)[1])
    low = ("--master-dtype", "bfloat16", "--optimizer-state-dtype", "bfloat16")
    said = json.loads(run(capsys, *words, *low)[1])
    one, two = (next(c for c in s["configurations"] if c["name"] == "zero3") for s in (plain, said))
    assert 2 * two["gpu"]["optimizer"] == one["gpu"]["optimizer"]
    assert len(said["refused"]) == len(plain["refused"]) + 2  # those with NVMe
    assert all("NVMe is not supported" in line for line in said["refused"][1:])


def test_a_file_for_another_number_of_ranks_is_left_out_and_said(
    model_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(SHIPPED / "zero3.json", tmp_path)
    one_host = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}
    (tmp_path / "hpz.json").write_text(json.dumps(one_host))
    words = ("--model-id", model_dir, "--gpu-memory", "20GiB", "--host-memory", "64GiB",
             "--max-seq-len", 4096)  # fmt: skip
    code, out, _ = run(capsys, *words, "--configs", tmp_path)
    assert code == 0
    assert "left out: hpz: `zero_optimization.zero_hpz_partition_size` is 3" in out
    code, out, err = run(capsys, *words, "--configs", tmp_path / "hpz.json")
    assert (code, out) == (2, "")
    assert "does not divide the world size 1" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "24XB"], "24XB' is not a size"),
        (["--gpu-memory", "24"], "is the unit missing"),
        (["--gpu-memory", "-3GiB"], "is not a size"),
        (["--gpu-memory", "24GiB", "--nvme-path", "/nowhere"], "is not a directory"),
        (["--gpu-memory", "24GiB", "--world-size", "0"], "must be from 1"),
        (["--gpu-memory", "24GiB", "--max-seq-len", "65536"], "was made for 40960"),
        (["--gpu-memory", "9" * 400 + "TiB"], "is not a size"),
        (["--gpu-memory", "9000000TiB"], "is more than any machine has"),
        (["--gpu-memory", "24GiB", "--nvme-path", "/dev/shm"], "is host memory and no disk"),
        (["--gpu-memory", "24GiB", "--train-batch-size", "65"], "cannot be split into 2 loss"),
        (["--gpu-memory", "24GiB", "--configs", "/nowhere"], "does not exist"),
        (["--gpu-memory", "24GiB", "--write", "/nowhere/my.json"], "cannot be written"),
        (["--gpu-memory", "24GiB", "--write", "/tmp"], "cannot be written: is a directory"),
        (["--gpu-memory", "24GiB", "--write", str(SHIPPED / "zero3.json")], "name another"),
        (["--gpu-memory", "24GiB", "--compute-dtype", "float32", "--grad-reduce-dtype",
          "bfloat16"], "--grad-reduce-dtype float32"),
    ],
)  # fmt: skip
def test_bad_questions_end_in_one_line(
    words: list[str], message: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [] if "--configs" in words else ["--configs", SHIPPED]
    code, _, err = run(capsys, "--model-id", model_dir, "--host-memory", "64GiB", *configs, *words)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json"),
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"architectures": ["MixtralForCausalLM"]}', "mixture"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "model_type=None"),
        (
            '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}',
            "has no 'hidden_size'",
        ),
    ],
)
def test_bad_models_end_in_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        model_of(str(tmp_path))


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": "false"}, {"hidden_act": "nothing"}])
def test_a_config_that_transformers_refuses_is_one_line(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    code, _, err = run(capsys, "--model-id", tmp_path, "--host-memory", "64GiB", "--gpu-memory",
                       "24GiB", "--configs", SHIPPED)  # fmt: skip
    assert (code, err.count("\n")) == (2, 1)
    assert "transformers cannot build a model from" in err


def test_loss_groups_round_up_as_in_training_and_idle_slots_are_said(model_dir: Path) -> None:
    asked = FitFlags(model_id=str(model_dir), configs=SHIPPED, world_size=48)
    question = question_about(model_of(str(model_dir)), asked)
    assert question.batches.micro_per_step == 2  # 32 packs of a group on 48 ranks, twice
    assumed = rates.assumed(24 * GIB, several_nodes=True)
    assert "33% of a step's pack slots idle" in fit_view.assumptions(question, assumed)[0]
    several = replace(question, flags=replace(asked, world_size=32))
    assert not any("idle" in line for line in fit_view.assumptions(several, assumed))


def test_without_a_gpu_its_memory_must_be_named(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--gpu-memory is missing"):
        fit_machine.machine_of(FitFlags(model_id=str(model_dir)))


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_size("24GiB", "x") == 24 * 2**30
    assert parse_size("80 GB", "x") == 80 * 10**9
    assert parse_size("1.5tib", "x") == 3 * 2**39
    assert 2**28 < memory_limit()[0] < 2**50


def test_measured_rates_replace_the_assumed_ones_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_machine, "_DISK_BYTES", 2**20)
    monkeypatch.setattr(fit_machine, "_copy_rate", lambda device: 7e9)
    found = rates.assumed(24 * GIB, several_nodes=False)
    got = fit_machine.measured(found, tmp_path)
    assert {"host_memory", "nvme_read", "nvme_write"} <= set(got.measured)
    assert got.host_memory == 7e9
    assert got.nvme_read > 0 < got.nvme_write
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_what_the_run_needs(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = harness.flags(tiny_model, tiny_data, tmp_path / "out")
    cli.main(["plan", *map(str, words), "--memory", "--json"])
    said = json.loads(capsys.readouterr().out)["memory"]
    parameters = model_of(str(tiny_model)).num_parameters
    assert said["gpu"]["optimizer"] == 12 * parameters
    assert said["gpu"]["total"] == sum(
        v for k, v in said["gpu"].items() if k not in ("phase", "total")
    )
    cli.main(["plan", *map(str, words), "--memory"])
    out = capsys.readouterr().out
    assert "a GPU at its peak" in out
    cli.main(["plan", *map(str, words)])
    assert "a GPU at its peak" not in capsys.readouterr().out


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "the run would stop"), (0.92, "within it")])
def test_a_plan_says_whether_the_budget_would_end_the_run(
    share: float, verdict: str, tiny_model: Path, tiny_data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A run may exceed it by a tenth: 1 / 1.1 is 0.909."""
    words = [*map(str, harness.flags(tiny_model, tiny_data, tmp_path / "out")), "--memory"]
    cli.main(["plan", *words, "--json"])
    said = json.loads(capsys.readouterr().out)["memory"]
    peak = (said["gpu"]["total"] - said["gpu"]["slack"]) / 1e9
    cli.main(["plan", *words, "--memory-budget-gb", str(share * peak)])
    assert verdict in capsys.readouterr().out


def test_fit_and_plan_know_the_bytes_of_apollos_state(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = low_rank.by_name(model_of(str(tiny_model)).shapes)
    parameters = sum(t.numel for t in tensors.values())
    moments = low_rank.moment_numel(tensors, 8, 1)
    apollo = ["--optimizer", "apollo", "--apollo-rank", "8"]
    words = [*map(str, harness.flags(tiny_model, tiny_data, tmp_path / "out")), *apollo]
    cli.main(["plan", *words, "--memory", "--json"])
    said = json.loads(capsys.readouterr().out)["memory"]
    assert said["gpu"]["optimizer"] == 4 * parameters + 8 * moments
    card = ["--gpu-memory", "24GiB", "--host-memory", "64GiB", "--max-seq-len", "64", "--json"]
    cli.main(["fit", "--model-id", str(tiny_model), *card, *apollo])
    found = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in found["configurations"]}
    assert by_name["zero3"]["gpu"]["optimizer"] == 4 * parameters + 8 * moments
    assert by_name["zero3"]["checkpoint"] == 4 * parameters + 8 * moments
    assert not any("nvme" in name for name in by_name)
    assert any("on NVMe does not work with --optimizer apollo" in line for line in found["refused"])
    with pytest.raises(SystemExit):
        cli.main(["fit", "--model-id", str(tiny_model), *card, *apollo[:2]])
    assert "use at most --apollo-rank 63" in capsys.readouterr().err
