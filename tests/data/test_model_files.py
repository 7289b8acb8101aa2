import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ds_sft.data.model_files import find_model
from ds_sft.data.weight_files import safetensors_header
from ds_sft.errors import ConfigError


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny untied model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_names_shapes_and_dtypes_are_those_of_the_safetensors_library(model: Path) -> None:
    expected = load_file(model / "model.safetensors")
    header = safetensors_header(model / "model.safetensors")
    assert header == {name: (array.shape, "F32") for name, array in expected.items()}


def test_untied_model_counts_its_head(model: Path) -> None:
    found = find_model(str(model))
    assert found is not None
    assert not found.tied
    arrays = load_file(model / "model.safetensors").values()
    assert found.num_parameters == sum(array.size for array in arrays)
    assert found.vocab_size == 512
    assert found.tokenizer_dir == model


def test_tied_head_is_counted_once_even_if_the_file_holds_it(
    tiny_tied_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_tied_model, tmp_path / "model"))
    before = find_model(str(model))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, model / "model.safetensors")
    after = find_model(str(model))
    assert before is not None
    assert after is not None
    assert after.tied
    assert after.num_parameters == before.num_parameters
    assert "lm_head.weight" not in after.tensors


@pytest.mark.parametrize("where", [(0, 0), (511, 63)])
@pytest.mark.parametrize("apart", [False, True])
def test_a_head_of_its_own_in_a_model_that_ties_it_is_refused(
    tiny_tied_model: Path, tmp_path: Path, where: tuple[int, int], apart: bool
) -> None:
    """transformers would take it and tie nothing: what is trained would be another model."""
    model = Path(shutil.copytree(tiny_tied_model, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    head[where] += 1
    if apart:
        save_file({"lm_head.weight": head}, model / "head.safetensors")
        weight_map = {**dict.fromkeys(tensors, "model.safetensors"),
                      "lm_head.weight": "head.safetensors"}  # fmt: skip
        index = {"weight_map": weight_map}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file({**tensors, "lm_head.weight": head}, model / "model.safetensors")
    with pytest.raises(ConfigError, match="hold different values: set it to false"):
        find_model(str(model))
    edit_config(model, tie_word_embeddings=False)
    found = find_model(str(model))
    assert found is not None
    assert not found.tied


def test_shards_are_read_through_the_index(model: Path) -> None:
    whole = find_model(str(model))
    assert whole is not None
    split_in_two(model)
    assert find_model(str(model)) == whole


def split_in_two(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:9],
              "model-00002-of-00002.safetensors": names[9:]}  # fmt: skip
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, model / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model.safetensors").unlink()


def test_a_missing_shard_is_named(model: Path) -> None:
    split_in_two(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors"):
        find_model(str(model))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_file_that_was_cut_is_refused(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        find_model(str(model))


def test_a_header_that_is_not_json_is_refused(model: Path) -> None:
    (model / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 20)
    with pytest.raises(ConfigError, match="no readable safetensors header"):
        find_model(str(model))


def test_pickled_weights_are_to_be_converted(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pickled ones \(\.bin\): convert"):
        find_model(str(model))


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not tested"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, "mixture of experts"),
        ({"architectures": ["MixtralForCausalLM"]}, "mixture of experts"),
        ({"architectures": ["OddLM"], "auto_map": {"AutoModel": "odd.py"}}, "auto_map"),
        ({"architectures": None}, "names no architecture"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": 600}, r"has shape \(512, 64\), config\.json asks for \(600, 64\)"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"missing model\.layers\.2\."),
        ({"num_hidden_layers": 1, "layer_types": None}, r"unexpected model\.layers\.1\."),
        ({"num_hidden_layers": 3}, "layer_types has 2 entries for num_hidden_layers=3"),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            r"unexpected model\.layers\.0\.self_attn\.k_norm",
        ),
        ({"attention_bias": True}, r"missing .*_proj\.bias"),
        ({"tie_word_embeddings": True, "hidden_size": 32}, "asks for"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false': write true or false"),
        ({"tie_word_embeddings": True}, "hold different values"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    model: Path, changes: dict[str, object], said: str
) -> None:
    edit_config(model, **changes)
    with pytest.raises(ConfigError, match=said):
        find_model(str(model))


def test_weights_in_whole_numbers_are_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is stored as I8"):
        find_model(str(model))


@pytest.mark.parametrize(
    ("model_id", "said"),
    [
        ("/no/such/model", "does not exist"),
        ("./model", "does not exist"),
        ("a/b/c", "does not exist"),
        ("qwen3", "neither a directory nor a Hub id"),
        ("", "neither a directory nor a Hub id"),
        ("Qwen/Qwen3 8B", "neither a directory nor a Hub id"),
    ],
)
def test_a_name_that_is_no_model_is_refused(
    model_id: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        find_model(model_id)


def put_into_cache(model: Path, hub: Path) -> Path:
    root = hub / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123")
    return Path(shutil.copytree(model, root / "snapshots" / "abc123"))


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_hub_id_is_found_in_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    snapshot = put_into_cache(model, tmp_path / "cache" / below)
    found = find_model("org/name")
    assert found is not None
    assert found.directory == snapshot


def test_a_hub_id_that_is_not_cached_is_left_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model("org/name") is None


def test_a_half_downloaded_model_counts_as_not_cached(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    split_in_two(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    put_into_cache(model, tmp_path / "hub")
    assert find_model("org/name") is None
