"""In-page's CPU platform: vLLM's, with another worker class.

A module of its own because vLLM resolves the platform while it is still being imported: nothing of the
engine can be imported here.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from inpage.engines import contract
from inpage.engines.activation import CPU_WORKER, SWITCH, why_not
from inpage.errors import ConfigError

logger = init_logger("vllm.inpage.platform")

VLLM_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


class InPageCpuPlatform(CpuPlatform):
    """vLLM's CPU platform; only the default worker class differs."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what is not covered, then choose the in-page worker where it is needed."""
        super().check_and_update_config(vllm_config)
        reason = why_not(vllm_config)
        parallel = vllm_config.parallel_config
        if reason is not None:
            logger.info_once("inpage: nothing to do: %s.", reason)
            return
        contract.verify("vllm", (*contract.SCHEDULER, *contract.CPU_WORKER))
        if parallel.worker_cls == VLLM_WORKER:
            parallel.worker_cls = CPU_WORKER
        elif parallel.worker_cls != CPU_WORKER:
            raise ConfigError(
                f"--worker-cls {parallel.worker_cls} replaces the worker that keeps the states in the pages: "
                f"drop the flag, or serve without {SWITCH}."
            )
