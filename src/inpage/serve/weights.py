"""A model folder's weights: are they all there, and how much memory will they take? Only headers are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inpage.errors import ConfigError

INDEX = "model.safetensors.index.json"
PATTERNS = {
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
}
"""Files by vLLM's `--load-format` (default_loader.py); the first pattern with a file is taken. Other formats look
elsewhere, and nothing is known of them."""

SIXTEEN_BITS = ("F16", "BF16")


def weights_bytes(folder: Path, load_format: str = "auto", dtype: str = "auto") -> int | None:
    """Bytes that the weights of a folder take in memory, None when that cannot be known from it.

    dtype: vLLM's `--dtype`; in `float32` weights of 16 bits take twice their files. Raises `ConfigError` when there
    are no weights, a part of them is missing, or a file is cut short.
    """
    if load_format not in PATTERNS:
        return None
    files = next((found for one in PATTERNS[load_format] if (found := sorted(folder.glob(one)))), [])
    named = _index(folder) if not files or files[0].suffix == ".safetensors" else []
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(named)} files of weights that {INDEX} names, {missing[0]} "
            "among them: download them again."
        )
    if not files:
        raise ConfigError(
            f"{folder} has no weights ({', '.join(PATTERNS[load_format])}): put the model's files there, or serve "
            "random weights with --load-format dummy."
        )
    if files[0].suffix != ".safetensors":
        return sum(file.stat().st_size for file in files)
    chosen = [folder / name for name in named] or files
    return sum(_tensors(file, dtype in ("float32", "float")) for file in chosen)


def _index(folder: Path) -> list[str]:
    """The files that the index names; empty when there is no index."""
    try:
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except OSError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX} is no index of safetensors files: download it again.") from error
    return sorted(set(names))


def _tensors(file: Path, widened: bool) -> int:
    """Bytes of the tensors of a file; `widened` counts those of 16 bits twice."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length + 8 > size:
            pointer = "it is a pointer of Git LFS, get the file itself" if start == b"version " else "download it again"
            raise ConfigError(f"{file} is no safetensors file ({size:,} bytes, header incomplete): {pointer}.")
        try:
            header: Mapping[str, Any] = json.loads(stream.read(length))
            tensors = [one for name, one in header.items() if name != "__metadata__"]
            ends = [one["data_offsets"][1] for one in tensors]
            spans = [(one["dtype"], one["data_offsets"][1] - one["data_offsets"][0]) for one in tensors]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"{file} is no safetensors file (its header cannot be read): download it again."
            ) from error
    if (whole := 8 + length + max(ends, default=0)) > size:
        raise ConfigError(f"{file} is cut short: {size:,} of {whole:,} bytes. Download it again.")
    return sum(span * (2 if widened and dtype in SIXTEEN_BITS else 1) for dtype, span in spans)
