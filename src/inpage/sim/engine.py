"""vLLM's own scheduler, built without a model: the one module here that imports vllm.

Works on 0.26.0 and 0.30.0. What differs between them is looked up by the names that each has, never by a
version number: retention (an environment variable there, a configuration field here) and the signatures of
`KVCacheConfig` and `Scheduler`.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from inpage.demo.model import DemoModel, make_model

RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
LONGEST = 1 << 21
"""No simulated request is longer, in tokens."""
GROUPS = 3
"""GDN groups of the Qwen hybrids."""
VERSION: str = vllm.__version__
SMALL_BUDGETS = "prefix_cache_retention_interval" in CacheConfig.__dataclass_fields__
"""Whether a budget below a block gets anywhere: 0.26.0 then schedules no prefill at all."""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What the scheduler is built from; token counts, `retention_tokens` None for dense."""

    block_tokens: int
    num_blocks: int
    budget: int
    max_num_seqs: int
    max_model_len: int
    asynchronous: bool = False
    policy: str = "fcfs"
    retention_tokens: int | None = None
    chunk_limit: int = 0
    reserve_whole_prompt: bool = False
    caching: bool = True
    mark_tokens: int | None = None
    """vLLM's `prefix_match_unit`; None for hits in whole blocks."""


@cache
def _model_folder() -> str:
    """A folder with the configuration of a tiny hybrid, removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="inpage-sim-")
    _KEPT.append(folder)
    return str(make_model(Path(folder.name), DemoModel(max_position=LONGEST)))


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _model_config() -> Any:
    folder = _model_folder()
    return ModelConfig(
        model=folder, tokenizer=folder, dtype="bfloat16", seed=0, max_model_len=LONGEST, skip_tokenizer_init=True
    )


def build_scheduler(settings: EngineSettings) -> Any:
    """A `Scheduler` or `AsyncScheduler` with one attention group and `GROUPS` GDN groups."""
    block, mode = settings.block_tokens, "align" if settings.caching else "none"
    model = _model_config()
    model.max_model_len = settings.max_model_len
    cache_config = CacheConfig(
        block_size=block,
        enable_prefix_caching=settings.caching,
        mamba_cache_mode=mode,
        mamba_block_size=block if settings.caching else None,
    )
    pool: dict[str, Any] = {}
    if hasattr(cache_config, "prefix_cache_retention_interval"):
        cache_config.prefix_cache_retention_interval = settings.retention_tokens
        pool["prefix_cache_retention_interval"] = settings.retention_tokens
    elif settings.retention_tokens is None:
        os.environ.pop(RETENTION_VARIABLE, None)
    else:
        os.environ[RETENTION_VARIABLE] = str(settings.retention_tokens)
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            # vLLM refuses a budget below max_num_seqs only; what prefill may use is set below.
            max_num_batched_tokens=settings.budget,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=settings.asynchronous,
            policy=settings.policy,
            long_prefill_token_threshold=settings.chunk_limit,
            scheduler_reserve_full_isl=settings.reserve_whole_prompt,
        ),
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    # Platforms reset these while the configuration is put together.
    cache_config.block_size = cache_config.mamba_block_size = block
    cache_config.mamba_cache_mode = mode
    cache_config.num_gpu_blocks = settings.num_blocks
    scheduler = (AsyncScheduler if settings.asynchronous else Scheduler)(
        config,
        KVCacheConfig(
            num_blocks=settings.num_blocks, kv_cache_tensors=[], kv_cache_groups=_groups(block, mode), **pool
        ),
        StructuredOutputManager(config),
        block_size=block,
        hash_block_size=settings.mark_tokens or block,
        log_stats=False,
    )
    scheduler.inpage_hasher = _hasher(settings.mark_tokens or block) if settings.caching else None
    return scheduler


def _groups(block: int, mode: str) -> list[Any]:
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=block,
        shapes=((1, 16), (1, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode=mode,
    )
    return [
        KVCacheGroupSpec(["attention"], attention),
        *(KVCacheGroupSpec([f"gdn.{group}"], state) for group in range(GROUPS)),
    ]


@cache
def _hasher(tokens: int) -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(tokens, sha256)


@cache
def _sampling(output_tokens: int) -> Any:
    """Greedy and of this length; requests read it only, and vLLM checks it at length when it is made."""
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


def make_request(
    scheduler: Any,
    name: str,
    prompt: list[int],
    output_tokens: int,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str | None = None,
    adapter: int = 0,
) -> Any:
    """A request that generates exactly `output_tokens` unless it is aborted."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=_sampling(output_tokens),
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
        cache_salt=salt,
        lora_request=LoRARequest(f"adapter-{adapter}", adapter, f"/adapter-{adapter}") if adapter else None,
        block_hasher=scheduler.inpage_hasher,
    )


def runner_output(requests: Sequence[str], sampled: list[list[int]]) -> Any:
    """What a model runner returns; `sampled` has a list per request, empty where nothing was sampled."""
    return ModelRunnerOutput(
        req_ids=list(requests),
        req_id_to_index={name: index for index, name in enumerate(requests)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def abort(scheduler: Any, names: Iterable[str]) -> None:
    """What a client that hangs up does to its requests."""
    scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)


def cached_blocks(scheduler: Any) -> Iterator[tuple[int, bytes, int, int]]:
    """Block id, hash, group and position of every entry that a lookup could find.

    A block that is found by several hashes is complete up to the longest of their prefixes, which is its position.
    """
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        if block.block_hash is not None:
            for key in (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())):
                yield block.block_id, get_block_hash(key), get_group_id(key), block.block_hash_num_tokens
