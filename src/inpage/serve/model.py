"""The model of a serve command: its folder, shape and geometry, as far as they are on this machine."""

from __future__ import annotations

from pathlib import Path

from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.serve.arguments import ServerArguments


def find_folder(model: str, given: ServerArguments) -> Path | None:
    """The folder with the model's config.json, None when vLLM will have to fetch it.

    Raises `ConfigError` for a path that cannot be a name on the hub and is no folder.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.is_file() and folder.suffix != ".json":
        raise ConfigError(f"{model} is a file: give the model's folder, with config.json, tokenizer and weights.")
    if folder.exists():
        return folder
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(f"There is no folder {model}: give a model's folder, or its name on the hub.")
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=given.value("--revision"))
    return Path(cached).parent if isinstance(cached, str) else None


def read_shape(model: str, given: ServerArguments) -> ModelShape | None:
    """The model's shape, None when its configuration is not on this machine yet (vLLM will fetch it)."""
    folder = find_folder(model, given)
    if folder is None:
        return None
    return ModelShape.from_file(folder, ssm_dtype=given.value("--mamba-ssm-cache-dtype"))


def read_geometry(shape: ModelShape, given: ServerArguments) -> Geometry:
    """The geometry vLLM will choose with these flags."""
    ssm_dtype = given.value("--mamba-ssm-cache-dtype")
    if ssm_dtype not in (None, "auto"):
        shape = ModelShape(**{**vars(shape), "ssm_dtype": ssm_dtype})
    return Geometry.of(
        shape,
        kv_dtype=given.value("--kv-cache-dtype") or "auto",
        tp=given.number("--tensor-parallel-size") or given.number("-tp") or 1,
        alignment=given.number("--block-size") or 128,
    )
