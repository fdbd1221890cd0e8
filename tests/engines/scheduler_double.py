"""The real scheduler and KV manager of vLLM with no model behind them: steps are scheduled and answered by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One attention group and three GDN groups over the same pages."""
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 8), (2, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    groups = [KVCacheGroupSpec(["attention"], attention)]
    groups += [KVCacheGroupSpec([f"gdn{index}"], state) for index in range(3)]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=None
    )


def make_scheduler(
    model: Path,
    num_blocks: int,
    budget: int = 24,
    sequences: int = 4,
    policy: str = "fcfs",
    is_async: bool = False,
    unit: int | None = None,
) -> Scheduler:
    """A scheduler for the model's configuration, dense retention, blocks of 16 tokens, marks every `unit`."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), tokenizer=str(model), dtype="bfloat16", max_model_len=1024),
        scheduler_config=SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=budget,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
            async_scheduling=is_async,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            mamba_block_size=BLOCK,
            prefix_cache_retention_interval=None,
            prefix_match_unit=unit,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.block_size = config.cache_config.mamba_block_size = BLOCK
    config.cache_config.num_gpu_blocks = num_blocks
    init_none_hash(sha256)
    kind = AsyncScheduler if is_async else Scheduler
    return kind(
        config,
        kv_cache_config(num_blocks),
        StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=unit or BLOCK,
        log_stats=False,
    )


def request(
    name: str, tokens: list[int], output: int = 4, priority: int = 0, arrival: float = 0.0, unit: int | None = None
) -> Request:
    """A request over token ids."""
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(unit or BLOCK, sha256),
        priority=priority,
        arrival_time=arrival,
    )


def answer(scheduler: Scheduler, output: Any, token: int = 1) -> None:
    """What the worker would say: one token for every request whose tokens are all computed."""
    names = list(output.num_scheduled_tokens)
    sampled = [
        [token] if scheduler.requests[n].num_computed_tokens >= scheduler.requests[n].num_tokens else [] for n in names
    ]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )


def run_to_end(scheduler: Scheduler, steps: int = 400) -> dict[str, int]:
    """Schedule and answer until nothing is left; returns the computed tokens each request first started from."""
    started: dict[str, int] = {}
    for _ in range(steps):
        if not scheduler.has_unfinished_requests():
            return started
        output = scheduler.schedule()
        for new in output.scheduled_new_reqs:
            started.setdefault(new.req_id, new.num_computed_tokens)
        answer(scheduler, output)
    raise AssertionError(f"requests are left after {steps} steps: {list(scheduler.requests)}")
