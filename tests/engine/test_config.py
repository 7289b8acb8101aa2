import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_sft.engine.config import check_keys, engine_config, optimizer_kind, read_json
from ds_sft.engine.json_keys import ACCEPTED, REFUSED, Rules, Value
from ds_sft.errors import ConfigError
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
RECIPE = RECIPES["qwen3-8b"]
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def config(values: dict[str, Any], recipe: Recipe = RECIPE, world_size: int = 8) -> dict[str, Any]:
    return engine_config(values, "my.json", recipe, world_size=world_size, per_device_batch=2)


def test_batch_sizes_are_those_of_one_microbatch() -> None:
    made = config({})
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["gradient_accumulation_steps"] == 1
    assert made["train_batch_size"] == 16


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_clipping_is_always_written_because_deepspeed_clips_at_one_without_it(clip: float) -> None:
    assert config({}, RECIPE.replace(max_grad_norm=clip))["gradient_clipping"] == clip


def test_gradients_are_accumulated_and_reduced_in_float32_by_default() -> None:
    made = config({})
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"
    assert made["bf16"] == {"enabled": True}


def test_reduction_follows_the_recipe_and_accumulation_stays_float32() -> None:
    made = config({}, RECIPE.replace(grad_reduce_dtype="bfloat16"))
    assert made["communication_data_type"] == "bf16"
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}


def test_float32_compute_has_no_bf16_section() -> None:
    assert "bf16" not in config({}, RECIPE.replace(compute_dtype="float32"))


def test_masters_and_moments_in_bfloat16_are_deepspeeds_own() -> None:
    both = RECIPE.replace(master_dtype="bfloat16", optimizer_state_dtype="bfloat16")
    assert config({}, both)["bf16"] == {
        "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }  # fmt: skip
    assert config({}, both)["data_types"] == {"grad_accum_dtype": "fp32"}
    masters = RECIPE.replace(master_dtype="bfloat16")
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert config(offload, masters)["bf16"]["bf16_optimizer_states"] is False
    with pytest.raises(ConfigError, match="needs offload_optimizer: use ds_configs/zero3_offload"):
        config({}, masters)
    with pytest.raises(ConfigError, match="optimizer on NVMe is not supported"):
        config({"zero_optimization": {"offload_optimizer": NVME}}, both)


def test_an_empty_file_means_stage_3() -> None:
    assert config({})["zero_optimization"] == {
        "stage": 3, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True,
    }  # fmt: skip


def test_what_the_file_says_about_speed_is_kept_and_the_file_is_not_changed() -> None:
    values = {
        "zero_optimization": {
            "overlap_comm": False, "sub_group_size": 1e9, "offload_optimizer": {"device": "CPU"},
        },
        "wall_clock_breakdown": True,
    }  # fmt: skip
    before = copy.deepcopy(values)
    made = config(values)
    assert made["zero_optimization"]["overlap_comm"] is False
    assert made["zero_optimization"]["sub_group_size"] == 1e9
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert made["wall_clock_breakdown"] is True
    assert values == before


@pytest.mark.parametrize(
    ("zero", "kind"),
    [
        ({}, "adamw"),
        ({"offload_optimizer": {"device": "none"}}, "adamw"),
        ({"offload_param": {"device": "cpu"}}, "adamw"),
        ({"offload_optimizer": {"device": "cpu"}}, "cpu_adam"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, "cpu_adam"),
    ],
)
def test_the_optimizer_follows_the_offload(zero: dict[str, Any], kind: str) -> None:
    assert optimizer_kind(config({"zero_optimization": zero})) == kind


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gradient_cliping": 1.0}, "did you mean `gradient_clipping`"),
        ({"gradient_clipping": 1.0}, "use --max-grad-norm"),
        ({"train_batch_size": 8}, "use --train-batch-size"),
        ({"train_micro_batch_size_per_gpu": 1}, "use --per-device-batch"),
        ({"gradient_accumulation_steps": 4}, "use --train-batch-size, --loss-groups"),
        ({"optimizer": {"type": "AdamW"}}, "use --learning-rate"),
        ({"scheduler": {"type": "WarmupLR"}}, "use --lr-schedule"),
        ({"bf16": {"enabled": True}}, "use --compute-dtype"),
        ({"fp16": {"enabled": True}}, "no place on Levanter's curve"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "--grad-reduce-dtype"),
        ({"communication_data_type": "bf16"}, "use --grad-reduce-dtype"),
        ({"torch_autocast": {"enabled": True}}, "use --compute-dtype"),
        ({"gradient_predivide_factor": 2.0}, "would not be Levanter's"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "would not be Levanter's"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "would not be Levanter's"),
        ({"zero_optimization": {"zenflow": {}}}, "changes the numbers (most of an update comes"),
        (
            {"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
            "which no checkpoint holds",
        ),
        ({"zero_optimization": {"offload_optimizer": {"cpuadam_cores_perc": 0.5}}}, "OMP_NUM"),
        ({"activation_checkpointing": {}}, "--recompute-every"),
        ({"amp": {"enabled": True}}, "was removed from DeepSpeed"),
        ({"elasticity": {"enabled": True}}, "was removed from DeepSpeed"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "was removed from DeepSpeed"),
        ({"checkpoint": {"writer": {"type": "FAST"}}}, "cannot be read back"),
        ({"checkpoint": {"load_universal": True}}, "use --resume"),
        ({"wandb": {"enabled": True}}, "use --wandb-project"),
        ({"zero_optimization": {"stage": 2}}, "is 2: ds_sft is built on stage 3"),
        ({"zero_optimization": {"stage": True}}, "is true, but must be a whole number"),
        ({"zero_optimization": {"overlap_com": True}}, "mean `zero_optimization.overlap_comm`"),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1}},
            "did you mean `zero_optimization.stage3_prefetch_bucket_size`",
        ),
        ({"overlap_comm": True}, "it belongs to `zero_optimization`"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "mean `zero_opt"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "one of none, cpu, nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path` is missing"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme_path` is missing"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}},
            "`zero_optimization.stage3_max_reuse_distance` must be 0",
        ),
        (
            {"zero_optimization": {"offload_optimizer": NVME}, "aio": {"block_size": 1000001}},
            "multiple of 4,096: use 1048576",
        ),
        (
            {
                "zero_optimization": {
                    "offload_param": {**NVME, "buffer_count": 1},
                    "stage3_max_reuse_distance": 0,
                }
            },
            "buffer_count` is 1, but DeepSpeed holds 2",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {**NVME, "buffer_count": 3}}},
            "buffer_count` must be at least 4: 4 for a",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {**NVME, "pipeline_read": True}}},
            "must be at least 8 with pipeline_read: 4",
        ),
        ({"zero_optimization": {"offload_optimizer": {**NVME, "ratio": 0.5}}}, "in a second optim"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "no checkpoint holds"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}, "at least 0 and at most 1"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "must be an object"),
        ({"zero_optimization": {"cpu_offload": True}}, '"offload_optimizer": {"device": "cpu"}'),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, '"auto", which only'),
        ({"zero_optimization": "auto"}, '"auto", which only'),
        ({"zero_optimization": True}, "must be an object"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, 'is "5e8", but must be a w'),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "but must be a whole number"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "at least 1"),
        ({"zero_optimization": {"overlap_comm": "true"}}, "but must be true or false"),
        ({"zero_optimization": {"overlap_comm": None}}, "is null, but must be true or false"),
        ({"zero_optimization": {"zero_hpz_partition_size": 3}}, "does not divide the world size 8"),
        ({"zero_optimization": {"leaf_module": {"classes": "A"}}}, "must be a list of texts"),
        ({"tensorboard": {"enabled": True, "path": "x"}}, "unknown key `tensorboard.path`"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(values)
    assert said in str(caught.value)
    assert str(caught.value).startswith("my.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_is_accepted(path: Path) -> None:
    made = engine_config(read_json(path), path, RECIPE, world_size=8, per_device_batch=1)
    assert made["zero_optimization"]["stage"] == 3


def test_every_shipped_file_and_key_is_explained() -> None:
    readme = (ROOT / "ds_configs" / "README.md").read_text()
    assert len(SHIPPED) >= 2
    for path in SHIPPED:
        assert f"`{path.name}`" in readme
        for key in paths_of(json.loads(path.read_text())):
            assert f"`{key.rpartition('.')[2]}`" in readme, f"{key} of {path.name}"


def paths_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    out: list[str] = []
    for key, value in values.items():
        out.append(prefix + key)
        if isinstance(value, dict):
            out += paths_of(value, f"{prefix}{key}.")
    return out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"my\.json:1:2: not JSON"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ('{"a": 1,}', r"my\.json:1:9: not JSON"),
        ("// x\n{}", r"my\.json:1:1: not JSON.*comments"),
        ("[1]", r"holds \[1\], not a JSON object"),
        ('{"dump_state": true, "dump_state": false}', "`dump_state` is given twice"),
        ('{"dump_state": NaN}', "NaN is not a number"),
    ],
)
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "my.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_json(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json does not exist"):
        read_json(tmp_path / "no.json")


def test_accepted_and_refused_do_not_overlap() -> None:
    accepted = set(rule_paths(ACCEPTED))
    assert not accepted & REFUSED.keys()


def test_every_refused_key_is_refused_by_name() -> None:
    for path, reason in REFUSED.items():
        *parents, key = path.split(".")
        values: dict[str, Any] = {key: None}
        for parent in reversed(parents):
            values = {parent: values}
        with pytest.raises(ConfigError) as caught:
            check_keys(values, "my.json")
        assert str(caught.value) == f"my.json: `{path}` {reason}"


def rule_paths(rules: Rules, prefix: str = "") -> list[str]:
    out: list[str] = []
    for key, rule in rules.items():
        out.append(prefix + key)
        if not isinstance(rule, Value):
            out += rule_paths(rule, f"{prefix}{key}.")
    return out


def known(prefix: str) -> set[str]:
    """Keys of our table one level below `prefix` ("" or "zero_optimization.")."""
    paths = [*rule_paths(ACCEPTED), *REFUSED]
    return {p[len(prefix) :].split(".")[0] for p in paths if p.startswith(prefix)}


@pytest.mark.slow
def test_the_table_holds_every_key_of_deepspeeds_own_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import leaf_module_config, offload_config
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization.": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param.": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer.": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module.": leaf_module_config.DeepSpeedZeroLeafModuleConfig,
        "comms_logger.": CommsLoggerConfig,
        "tensorboard.": TensorBoardConfig,
        "csv_monitor.": CSVConfig,
        "timers.throughput.": DeepSpeedThroughputTimerConfig,
    }
    removed = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    for prefix, model in models.items():
        fields = {field.alias or name for name, field in model.model_fields.items()}
        assert known(prefix) - removed == fields, prefix


class RecordingDict(dict[str, Any]):
    """A configuration that remembers which keys were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "RecordingDict":
        return self


@pytest.mark.slow
def test_the_table_holds_every_top_level_key_that_deepspeed_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.profiling import constants as profiling
    from deepspeed.runtime import config as ds
    from deepspeed.runtime import constants
    from deepspeed.runtime.model_checkpointing import constants as saving
    from deepspeed.runtime.swap_tensor import constants as swap

    asked = RecordingDict({"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    ds.DeepSpeedConfig(asked)
    assert {"gradient_clipping", "bf16", "zero_optimization", "timers"} <= asked.seen
    assert asked.seen <= known("")
    assert ds._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= known("")
    assert {f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS} <= REFUSED.keys()

    assert known("checkpoint.") == {
        constants.CHECKPOINT_TAG_VALIDATION,
        constants.LOAD_UNIVERSAL_CHECKPOINT,
        constants.USE_NODE_LOCAL_STORAGE_CHECKPOINT,
        constants.CHECKPOINT_PARALLEL_WRITE,
        saving.CHECKPOINT_SERIALIZATION,
        saving.CHECKPOINT_WRITER,
    }
    assert known("aio.") == texts(swap, "AIO_")
    assert known("flops_profiler.") == texts(profiling, "FLOPS_PROFILER_")


def texts(module: ModuleType, prefix: str) -> set[str]:
    """Values of the module's constants that name a key."""
    names = [n for n in vars(module) if n.startswith(prefix) and not n.endswith("_DEFAULT")]
    values = [getattr(module, name) for name in names]
    return {v for v in values if isinstance(v, str) and "\n" not in v}


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_deepspeed_itself_reads_what_we_make(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    recipe = RECIPE.replace(max_grad_norm=0.0)
    values = read_json(path)
    if "zero_hpz_partition_size" in values["zero_optimization"]:
        values["zero_optimization"]["zero_hpz_partition_size"] = 1
    made = engine_config(values, path, recipe, world_size=1, per_device_batch=2)
    read = DeepSpeedConfig(made)
    assert read.gradient_clipping == 0.0
    assert read.communication_data_type == torch.float32
    assert read.grad_accum_dtype == "fp32"
    assert read.bfloat16_config.enabled
    assert not read.bfloat16_config.bf16_master_weights_and_grads
    assert read.train_batch_size == 2
    assert read.zero_config.stage == 3
    assert read.zero_config.reduce_scatter
    assert (read.zero_config.offload_optimizer is not None) == ("offload" in path.name)


def test_the_flag_names_the_place_of_everything_on_nvme_and_of_nothing_else() -> None:
    zero = {
        "offload_optimizer": NVME, "offload_param": {"device": "NVMe"},
        "stage3_max_reuse_distance": 0,
    }  # fmt: skip
    made = engine_config(
        {"zero_optimization": zero}, "my.json", RECIPE,
        world_size=8, per_device_batch=2, nvme_path=Path("/fast"),
    )["zero_optimization"]  # fmt: skip
    for name in ("offload_optimizer", "offload_param"):
        assert made[name]["nvme_path"] == "/fast"
        assert made[name]["device"] == "nvme"
    with pytest.raises(ConfigError, match=r"--nvme-path /fast: my\.json puts nothing on NVMe"):
        engine_config(
            {}, "my.json", RECIPE, world_size=8, per_device_batch=2, nvme_path=Path("/fast")
        )


def test_apollo_takes_an_offloaded_state_in_host_memory_and_none_on_nvme() -> None:
    recipe = RECIPE.replace(optimizer="apollo-mini")
    made = config({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, recipe)
    assert made["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in config({})
    with pytest.raises(ConfigError, match=r"apollo-mini.*use ds_configs/zero3_offload_optimizer.j"):
        config({"zero_optimization": {"offload_optimizer": NVME}}, recipe)
