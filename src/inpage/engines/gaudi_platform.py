"""On Gaudi's platform: refuses what in-page does not cover, and chooses the worker that keeps states in pages.

A module of its own because it runs in every process, the front end too, where no worker code may be imported.
vllm-gaudi's platform class stays; its `check_and_update_config` is followed by the choice. The worker class then
travels with the configuration: whoever sees it, scheduler or worker, knows what was decided.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm_gaudi.platform import HpuPlatform

from inpage.engines import contract
from inpage.engines.activation import DECODE_PAD_WORKER, GAUDI_SWITCH, GAUDI_WORKER, switch, why_not
from inpage.errors import ConfigError

logger = init_logger("vllm.inpage.platform")

HPU_WORKER = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
MULTI_MODEL = "VLLM_HPU_MULTI_MODEL_CONFIG"
RETENTION = "prefix_cache_retention_interval"


@dataclass
class _Choice:
    """What was asked for in this process; each entry point adds its own."""

    in_page: bool = False
    decode_pad: bool = False


_choice = _Choice()


def install(*, in_page: bool = False, decode_pad: bool = False) -> None:
    """Have the platform choose the worker."""
    _choice.in_page |= in_page
    _choice.decode_pad |= decode_pad
    original = HpuPlatform.check_and_update_config.__func__
    if getattr(original, "inpage", False):
        return

    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if _choice.in_page:
            refuse_what_turns_caching_off(vllm_config)
        original(cls, vllm_config)
        choose_worker(vllm_config)

    check_and_update_config.inpage = True  # type: ignore[attr-defined]
    HpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def choose_worker(vllm_config: Any) -> None:
    """Put in-page's worker, or the one that only pads decodes, in the place of vllm-gaudi's.

    A model that is switched to later meets the worker that is there already, so with several models (vllm-gaudi's
    multi-model configuration) the worker is in-page's from the start; it does nothing for models without need.
    """
    worker = None
    if _choice.in_page:
        reason = why_not(vllm_config)
        if reason is None:
            make_retention_dense(vllm_config.cache_config)
        else:
            logger.info_once("inpage: nothing to do: %s.", reason)
        if reason is None or os.environ.get(MULTI_MODEL):
            worker = GAUDI_WORKER
            contract.verify("vllm", contract.SCHEDULER)
            contract.verify("vllm_gaudi", contract.GAUDI_WORKER)
    if worker is None and _choice.decode_pad:
        worker = DECODE_PAD_WORKER
        contract.verify("vllm_gaudi", contract.GAUDI_DECODE_PAD)
    parallel = vllm_config.parallel_config
    if worker is None or parallel.worker_cls == worker:
        return
    if parallel.worker_cls not in (HPU_WORKER, GAUDI_WORKER, DECODE_PAD_WORKER):
        raise ConfigError(
            f"--worker-cls {parallel.worker_cls} replaces the worker that {worker} extends: drop the flag, or serve "
            f"without {switch()}."
        )
    parallel.worker_cls = worker


def refuse_what_turns_caching_off(vllm_config: Any) -> None:
    """Raise `ConfigError` for settings that make vllm-gaudi drop prefix caching, or move pages, without a word."""
    model = vllm_config.model_config
    if model is None or not model.is_hybrid or not vllm_config.cache_config.enable_prefix_caching:
        return
    reasons = (
        (
            _is_on("VLLM_CONTIGUOUS_PA"),
            "VLLM_CONTIGUOUS_PA=1 makes vllm-gaudi turn prefix caching off: set VLLM_CONTIGUOUS_PA=0",
        ),
        (
            _is_on("VLLM_DEFRAG"),
            "VLLM_DEFRAG=1 moves pages to other blocks behind the scheduler's back, checkpoints among them: "
            "set VLLM_DEFRAG=0",
        ),
        (
            not _is_on("VLLM_USE_HYBRID_CACHE", default=True),
            "VLLM_USE_HYBRID_CACHE=0 takes the slots away in which running states live: unset it",
        ),
        (
            _is_on("VLLM_USE_NAIVE_MAMBA_CACHE_SHARING"),
            "VLLM_USE_NAIVE_MAMBA_CACHE_SHARING=1 lays attention out in whole blocks, which is not covered: unset it",
        ),
        (model.runner_type == "pooling", "pooling models run their forward pass elsewhere and are not covered"),
    )
    for applies, reason in reasons:
        if applies:
            raise ConfigError(f"{reason}, or serve without {GAUDI_SWITCH}=1.")


def _is_on(name: str, default: bool = False) -> bool:
    """As vllm-gaudi reads its switches."""
    value = os.environ.get(name, "").strip().lower()
    return value in ("true", "t", "1", "yes", "y", "on") if value else default


def make_retention_dense(cache_config: Any) -> None:
    """Keep a checkpoint at every boundary where vLLM's default (0, from 0.30.0 on) keeps a few; others are heeded."""
    if getattr(cache_config, RETENTION, None) == 0:
        setattr(cache_config, RETENTION, None)
