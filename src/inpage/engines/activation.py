"""Is in-page wanted, and is the configuration one that it covers?

Asked for with `INPAGE=1` (anywhere but Gaudi) together with prefix caching; without it nothing of vLLM is
touched. What is asked for but not covered is refused before anything starts, with one sentence.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from inpage.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = "INPAGE"
CPU_WORKER = "inpage.engines.cpu.InPageCPUWorker"
GDN_LAYER = "linear_attention"
"""How Qwen3-Next and Qwen3.5 configurations name a Gated DeltaNet layer in `layer_types`."""


def wanted() -> bool:
    """Whether the user asked for in-page; raises `ConfigError` for a value that is neither on nor off."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={value!r} is neither on nor off: set {SWITCH}=1 or unset it")
    return value == "1"


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
    reasons = (
        (
            GDN_LAYER not in layer_types,
            f"{config.model_config.architecture} is a hybrid without Gated DeltaNet layers "
            f"(no {GDN_LAYER!r} in layer_types)",
        ),
        (config.speculative_config is not None, "speculative decoding (--speculative-config) is not covered yet"),
        (
            getattr(cache, "prefix_match_unit", None) is not None,
            f"--prefix-match-unit {getattr(cache, 'prefix_match_unit', None)} is not covered yet: hits come in whole "
            "blocks",
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
            raise ConfigError(f"{reason}. Change the flag, or serve without {SWITCH}.")


class StatsInterval:
    """Says when a line of counters is due: after the engine's stat interval, and only when something changed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last_time = time.monotonic()
        self._last_line = ""

    def due(self, line: str) -> bool:
        """Whether to log this line now."""
        now = time.monotonic()
        if now - self._last_time < self._seconds or line == self._last_line:
            return False
        self._last_time, self._last_line = now, line
        return True

    def changed(self, line: str) -> bool:
        """Whether the line says something that has not been logged yet."""
        return line != self._last_line
