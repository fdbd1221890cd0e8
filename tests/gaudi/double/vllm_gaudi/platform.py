"""The platform class: chooses the worker, and turns prefix caching off for contiguous PA without a word."""

from __future__ import annotations

import os
from typing import Any


class HpuPlatform:
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
        if os.environ.get("VLLM_CONTIGUOUS_PA") == "1":
            vllm_config.cache_config.enable_prefix_caching = False
