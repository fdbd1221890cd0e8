"""The worker: builds its runner by the name in this module, again when it is given another model."""

from __future__ import annotations

from typing import Any

from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner


class HPUWorker:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_runner: HPUModelRunner | None = None

    def init_device(self) -> None:
        self.model_runner = HPUModelRunner(self.vllm_config)

    def load_model(self, vllm_config: Any = None) -> None:
        if vllm_config is not None:
            self.vllm_config = vllm_config
            self.model_runner = HPUModelRunner(vllm_config)

    def sleep(self, level: int = 1) -> None:
        self.model_runner.kv_caches = []

    def shutdown(self) -> None:
        pass
