"""`ds-sft fit`: can this model be trained at this length here, with which JSON, how fast?

Owns the model's shapes (config.json is enough) and the written file. The flags are
`fit_question`'s, the comparison is `fit_rows`', how it looks `fit_view`'s; what layers keep is
measured by `model.activations`, and torch is imported only for that.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ds_sft.data.architectures import check_architecture, expected_shapes
from ds_sft.data.hub import cached_revision
from ds_sft.data.model_files import (
    ModelFiles,
    find_model,
    of_config,
    read_config,
)
from ds_sft.engine.config import read_json
from ds_sft.engine.host_memory import device
from ds_sft.engine.memory import Activations
from ds_sft.errors import ConfigError
from ds_sft.fit_question import FitFlags, Question
from ds_sft.fit_rows import compare, fitting, row, usable
from ds_sft.plan_memory import of_layers
from ds_sft.run.atomic import write_file


def run(flags: FitFlags) -> None:
    """The command. Raises ConfigError."""
    from ds_sft import fit_probe, fit_view
    from ds_sft.fit_machine import machine_of, rates_of

    jsons = read_configs(flags.configs)
    if flags.write is not None:
        check_writable(flags.write, flags.configs)
    model = model_of(flags.model_id)
    longest = model.max_position_embeddings
    if longest is not None and flags.max_seq_len > longest:
        raise ConfigError(
            f"--max-seq-len {flags.max_seq_len}: {flags.model_id} was made for {longest} "
            f"(max_position_embeddings): use at most {longest}"
        )
    machine = machine_of(flags)
    machine_rates = rates_of(flags, machine)
    question = question_about(model, flags)
    question.check_optimizer()
    jsons, refused = usable(question, jsons)
    rows = compare(question, jsons, machine, machine_rates)
    probed = fit_probe.probe(question, jsons, machine, machine_rates) if flags.probe else []
    written = None
    if flags.write is not None:
        ran = fit_probe.fastest(probed)
        best = fitting(question, jsons, machine, machine_rates)
        if flags.probe:
            best = None if ran is None else (ran.row.name, ran.config)
        if best is not None:
            _write(question, best[1], flags.write)
            written = row(question, *best, machine, machine_rates)
    fit_view.show(question, machine, machine_rates, rows, refused, written, probed)
    if flags.write is not None and written is None:
        raise ConfigError(
            f"--write {flags.write}: no candidate ran: change what the answer above names"
            if flags.probe
            else f"--write {flags.write}: no file of {flags.configs} fits, not even with the "
            "smallest sizes: change what the answer above names"
        )


def question_about(model: ModelFiles, flags: FitFlags) -> Question:
    """The question that `flags` ask; what layers keep is measured when it is needed."""
    remeasure = cache(lambda changed: measured(model, changed))
    return Question(model=model, flags=flags, activations=remeasure(flags), remeasure=remeasure)


def _write(question: Question, value: dict[str, Any], path: Path) -> None:
    if question.flags.nvme_path is not None:
        for section in ("offload_optimizer", "offload_param"):
            if device(value["zero_optimization"], section) == "nvme":
                nvme_path = str(question.flags.nvme_path.resolve())
                value["zero_optimization"][section]["nvme_path"] = nvme_path
    try:
        write_file(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from None


def check_writable(path: Path, configs: Path) -> None:
    """Raise ConfigError unless the answer can go to `path`: a probe may take hours before that."""
    if any(path.resolve() == file.resolve() for file in _json_files(configs)):
        raise ConfigError(f"--write {path} is one of the files that are compared: name another")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--write {path} cannot be written: {os.strerror(error.errno or 0).lower()}")


def _json_files(configs: Path) -> list[Path]:
    return sorted(configs.glob("*.json")) if configs.is_dir() else [configs]


def read_configs(path: Path) -> dict[str, dict[str, Any]]:
    """The DeepSpeed JSONs in a directory, or one, by name. Raises ConfigError."""
    files = _json_files(path)
    if not files:
        raise ConfigError(f"--configs {path} holds no .json: use ds_configs")
    return {file.stem: read_json(file) for file in files}


def model_of(model_id: str) -> ModelFiles:
    """The model's shapes, from weights' headers or config.json alone. Raises ConfigError."""
    path = Path(model_id).expanduser()
    directory = path if path.is_dir() else None
    if directory is None and model_id.count("/") == 1:
        directory = cached_revision(model_id)
    if not model_id or directory is None or any(directory.glob("*.safetensors")):
        model = find_model(model_id)
        if model is None:
            raise ConfigError(
                f"--model-id {model_id} is not in the Hub's cache of this machine: download its "
                "config.json, and name the directory"
            )
        return model
    return without_weights(directory)


def without_weights(directory: Path) -> ModelFiles:
    """A model of which only config.json is there. Raises ConfigError."""
    config, _ = read_config(directory)
    tied = bool(config.get("tie_word_embeddings", False))
    with of_config(directory):
        check_architecture(directory, config)
        shapes = expected_shapes(config, tied)
    tensors = {name: (shape, "BF16") for name, shape in shapes.items()}
    return ModelFiles(directory=directory, config=config, tensors=tensors, tied=tied)


def measured(model: ModelFiles, flags: FitFlags) -> Callable[[int], Activations]:
    """Activations of this model by tokens of a microbatch; each length is measured once."""
    kernel = "varlen" if flags.compute_dtype == "bfloat16" else "sdpa"
    return cache(lambda tokens: of_layers(model, tokens, flags, flags.compute_dtype, kernel))
