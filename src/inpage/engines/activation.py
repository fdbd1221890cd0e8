"""Is in-page wanted, and is the configuration one that it covers?

Asked for together with prefix caching: with `VLLM_COMPACT_GDN=1` on Gaudi, with `INPAGE=1` anywhere else; without
that nothing of vLLM is touched. `INPAGE=0` turns it off everywhere. What is asked for but not covered is refused
before anything starts, with one sentence.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from logging import Logger
from typing import TYPE_CHECKING

from inpage.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = "INPAGE"
GAUDI_SWITCH = "VLLM_COMPACT_GDN"
"""vllm-gaudi's own variable for GDN states in slots; set to 1 by the user, it asks for in-page on Gaudi."""
DECODE_PAD_SWITCH = "INPAGE_HYBRID_DECODE_PAD"
CPU_WORKER = "inpage.engines.cpu.InPageCPUWorker"
GAUDI_WORKER = "inpage.engines.gaudi.InPageHPUWorker"
DECODE_PAD_WORKER = "inpage.engines.gaudi.DecodePadHPUWorker"
GDN_LAYER = "linear_attention"
"""How Qwen3-Next and Qwen3.5 configurations name a Gated DeltaNet layer in `layer_types`."""


CPU_CHUNK, GAUDI_CHUNK = 64, 128
"""Tokens that the chunked GDN kernels take at a time: vLLM's for CPU, and vllm-gaudi's."""


def on_gaudi() -> bool:
    """Whether vllm-gaudi is installed here; nothing is imported to find out."""
    return importlib.util.find_spec("vllm_gaudi") is not None


def switch() -> str:
    """What a user sets to ask for in-page here, and unsets to be rid of it."""
    return f"{GAUDI_SWITCH}=1" if on_gaudi() else f"{SWITCH}=1"


def wanted() -> bool:
    """Whether the user asked for in-page; raises `ConfigError` for a value that is neither on nor off."""
    value = _flag(SWITCH)
    if not on_gaudi():
        return value == "1"
    asked = os.environ.get(GAUDI_SWITCH, "").strip().lower() in ("1", "true")  # as vllm-gaudi reads it
    if value == "1" and not asked:
        raise ConfigError(f"{SWITCH}=1 does not ask for in-page on Gaudi: set {GAUDI_SWITCH}=1 instead")
    return asked and value != "0"


def decode_pad_wanted() -> bool:
    """Whether the user asked for the fix of decode padding alone (Gaudi; in-page brings it along)."""
    return _flag(DECODE_PAD_SWITCH) == "1"


def _flag(name: str) -> str:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name}={value!r} is neither on nor off: set {name}=1 or unset it")
    return value


def why_not(config: VllmConfig) -> str | None:
    """Why in-page has nothing to do for this configuration, or None when it is to be used.

    Raises `ConfigError` when it would be needed but does not cover the configuration.
    """
    model = config.model_config
    if model is None or not getattr(model, "is_hybrid", False):
        return "the model is not a hybrid: vLLM's own prefix caching is all it needs"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--enable-prefix-caching)"
    refuse_uncovered(config)
    return None


def refuse_uncovered(config: VllmConfig) -> None:
    """Raise `ConfigError`, one sentence, for a configuration that in-page does not cover yet."""
    cache, parallel = config.cache_config, config.parallel_config
    layer_types = getattr(config.model_config.hf_text_config, "layer_types", None) or ()
    unit, kernel_tokens = getattr(cache, "prefix_match_unit", None) or 0, GAUDI_CHUNK if on_gaudi() else CPU_CHUNK
    reasons = (
        (
            GDN_LAYER not in layer_types,
            f"{config.model_config.architecture} is a hybrid without Gated DeltaNet layers "
            f"(no {GDN_LAYER!r} in layer_types)",
        ),
        (config.speculative_config is not None, "speculative decoding (--speculative-config) is not covered yet"),
        (
            bool(unit % kernel_tokens),
            f"--prefix-match-unit {unit} is no multiple of {kernel_tokens}, the tokens that the GDN kernel takes at a "
            "time here: a prefill that starts at such a mark would not equal a cold one to the bit",
        ),
        (cache.mamba_cache_mode == "all", "--mamba-cache-mode all is not covered: use align"),
        (
            config.kv_transfer_config is not None,
            "KV connectors (--kv-transfer-config) are not covered: they know nothing of the states in the pages",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size}) is not covered yet",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "decode context parallelism (--decode-context-parallel-size) is not covered",
        ),
        (getattr(cache, "use_replayssm", False), "--use-replayssm keeps states elsewhere and is not covered"),
        (
            getattr(config, "use_v2_model_runner", False),
            "the V2 model runner is not covered: unset VLLM_USE_V2_MODEL_RUNNER",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise ConfigError(f"{reason}. Change the flag, or serve without {switch()}.")


class StatsLog:
    """Logs a line of counters after each of the engine's stat intervals in which something changed, and a last one.

    The line at shutdown comes even when nothing has changed since the one before: who looks for it finds it.
    """

    def __init__(self, logger: Logger, who: str, seconds: float) -> None:
        self._logger = logger
        self._who = who
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._last_line = ""

    def log(self, line: Callable[[], str], at_shutdown: bool = False) -> None:
        """Log the line if it is due; called every step, so it is made only then."""
        now = time.monotonic()
        if not at_shutdown and now < self._next:
            return
        self._next = now + self._seconds
        text = f"{self._who}{', at shutdown' if at_shutdown else ''}: {line()}"
        if text != self._last_line:
            self._last_line = text
            self._logger.info("inpage %s", text)
