"""The scheduler in its v0.30.0 shape: partial chunks end on kernel blocks, and vLLM's split is not asked."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

KERNEL_BLOCK = 4


class HPUAsyncScheduler(Scheduler):
    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start < end and num_new_tokens < end - start:
            return num_new_tokens // KERNEL_BLOCK * KERNEL_BLOCK
        return num_new_tokens
