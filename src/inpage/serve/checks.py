"""What would end vLLM's start with a stack of its own, found before it starts; each check raises one sentence."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from inpage.engines.activation import GDN_LAYER, why_not
from inpage.errors import ConfigError
from inpage.layout.model import longest_length, read_config
from inpage.serve.arguments import ServerArguments
from inpage.serve.pool import LENGTH, length_of

RETENTION = "--prefix-cache-retention-interval"
PORT = 8000
"""vLLM's default."""

LISTS = (("vllm", "model_executor/models/registry.py"), ("transformers", "models/auto/modeling_auto.py"))
"""Packages, and the sources in which they list the architectures they know."""

ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "tokeniz*.py",
)
"""Any of these makes a tokenizer; without all of them transformers ends the start."""


def refuse_missing_engine() -> None:
    """There is no vLLM for this Python."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed for this Python: make setup, or install inpage beside vLLM 0.30.0.")


def refuse_uncovered_flags(given: ServerArguments) -> None:
    """Flags that in-page does not cover: the engine's own words, before it starts."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=True, architecture="the model", hf_text_config=SimpleNamespace(layer_types=[GDN_LAYER])
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            prefix_match_unit=given.number("--prefix-match-unit"),
            mamba_cache_mode=given.value("--mamba-cache-mode") or "align",
            use_replayssm=given.has("--use-replayssm"),
        ),
        speculative_config=given.value("--speculative-config"),
        kv_transfer_config=given.value("--kv-transfer-config"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=given.number("--pipeline-parallel-size") or given.number("-pp") or 1,
            decode_context_parallel_size=given.number("--decode-context-parallel-size") or 1,
        ),
    )
    why_not(cast(Any, config))


def refuse_folder(folder: Path, given: ServerArguments, variables: Mapping[str, str]) -> None:
    """An architecture that this vLLM does not have, a length that the model does not allow, no tokenizer."""
    if not given.has("--hf-overrides", "--model-impl", "--config-format", "--hf-config-path"):
        config, file = read_config(folder)
        _refuse_architecture(config, file)
        _refuse_length(config, file, given, variables)
    if not given.has("--skip-tokenizer-init", "--tokenizer-mode"):
        _refuse_tokenizer(Path(given.value("--tokenizer") or folder))


def _refuse_architecture(config: Mapping[str, Any], file: Path) -> None:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{file} names no architectures: vLLM cannot tell which model it is.")
    known = _architectures()
    # A plugin may register more, and code beside the model brings its own.
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    others = [one.name for one in plugins if one.value.split(".")[0] not in ("vllm", "inpage")]
    if not known or others or config.get("auto_map") or any(f'"{name}"' in known for name in names):
        return
    raise ConfigError(
        f"{file}: this vLLM has no architecture {', '.join(map(str, names))}. Use a release that has it, or correct "
        "architectures."
    )


def _architectures() -> str:
    """The source in which vLLM and transformers list their models; nothing is imported. Empty when it is not there."""
    texts = []
    for package, path in LISTS:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            if (file := Path(root) / path).is_file():
                texts.append(file.read_text(encoding="utf-8"))
    return "\n".join(texts)


def _refuse_length(config: Mapping[str, Any], file: Path, given: ServerArguments, variables: Mapping[str, str]) -> None:
    asked, longest = length_of(given), longest_length(config)
    allowed = variables.get(ALLOW_LONG, "0") not in ("", "0")
    if asked is None or longest is None or asked <= longest or allowed:
        return
    raise ConfigError(
        f"{LENGTH} {asked:,} is longer than the {longest:,} tokens that {file} allows: give at most that, or set "
        f"{ALLOW_LONG}=1."
    )


def _refuse_tokenizer(folder: Path) -> None:
    if not folder.is_dir() or any(next(folder.glob(one), None) for one in TOKENIZERS):
        return
    raise ConfigError(
        f"{folder} has no tokenizer ({', '.join(TOKENIZERS[:4])}): put its files there, or name another folder with "
        "--tokenizer."
    )


def refuse_retention(given: ServerArguments, block_tokens: int) -> None:
    """A retention interval that is no number of blocks: vLLM ends in the engine's process for it."""
    value = given.value(RETENTION)
    if value in (None, "None", "0"):
        return
    interval = given.number(RETENTION) or 0
    if interval % block_tokens:
        raise ConfigError(
            f"{RETENTION} {interval} is no multiple of the block of {block_tokens} tokens: give one, 0, or None for a "
            "checkpoint at every boundary."
        )


def refuse_address(given: ServerArguments) -> None:
    """An address where the server could not listen: taken, not this machine's, not allowed."""
    path = given.value("--uds")
    if path is not None:
        _refuse_socket(Path(path))
        return
    host, port = given.value("--host") or "", given.number("--port") or PORT
    if port > 65535:
        raise ConfigError(f"--port {port} is no port: give a number up to 65535.")
    where = f"port {port} of {host or 'all addresses'}"
    problem = _bind(host, port)
    if problem is None:
        return
    if problem.errno == errno.EADDRINUSE:
        free = next((one for one in range(port + 1, min(port + 100, 65536)) if _bind(host, one) is None), None)
        raise ConfigError(
            f"{where} is taken by another program: give another --port{f', {free} is free' if free else ''}."
        )
    if problem.errno == errno.EACCES:
        raise ConfigError(f"{where} may not be used without more rights: give a --port of 1024 or above.")
    raise ConfigError(f"{where} cannot be used ({problem.strerror or problem}): give a --host of this machine.")


def _bind(host: str, port: int) -> OSError | None:
    """Bind as vLLM does, and let go at once; the error when it cannot be done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets with SO_REUSEADDR may be bound to a port while neither listens.
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _refuse_socket(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ConfigError(f"--uds {path} is there already: stop the server that listens on it, or remove the file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--uds {path}: there is no folder {path.parent}.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(str(path))
        except OSError as error:
            raise ConfigError(f"--uds {path} cannot be made: {error.strerror or error}.") from error
    os.unlink(path)
