"""In-page on vLLM's CPU engine: worker and model runner.

What differs from vLLM's own align mode, where the running state lives in the block itself and is copied
from block to block: here it lives in a slot, and the block's page holds a checkpoint.

| vLLM's step                     | here                                                                     |
|---------------------------------|--------------------------------------------------------------------------|
| `initialize_kv_cache_tensors`   | GDN layers are bound to slots; their page views become the page store    |
| `_update_states`                | preceded by `Mover.before_forward`: hand back, zero, copy, give, restore |
| `preprocess_mamba`              | skipped: no state moves from block to block                              |
| `_build_attention_metadata`     | state indices become slots                                               |
| `_model_forward`                | followed by the saves                                                    |
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.worker import gpu_model_runner, mamba_utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from inpage.engines.activation import StatsLog
from inpage.engines.metrics import WorkerReport
from inpage.engines.scheduler import geometry_of, group_ids, step_facts, step_runs
from inpage.engines.start import start_line
from inpage.errors import ConfigError, StateError
from inpage.state.ledger import Ledger
from inpage.state.mover import Mover
from inpage.state.pages import WORD, LayerStates, PageStore, rows_of_words
from inpage.state.slots import SlotTable

logger = init_logger("vllm.inpage.worker")

NULL_SLOT = 0
"""Row 0 of the slot tensors is nobody's: vLLM pads state indices with 0."""


class InPageCPUWorker(vllm_cpu_worker.CPUWorker):
    """vLLM's CPU worker with the in-page model runner."""

    def init_device(self) -> None:
        """As vLLM's, with the runner class swapped while it builds its runner."""
        original = vllm_cpu_worker.CPUModelRunner
        vllm_cpu_worker.CPUModelRunner = InPageCPUModelRunner
        try:
            super().init_device()
        finally:
            vllm_cpu_worker.CPUModelRunner = original

    def shutdown(self) -> None:
        """Log the last counters, then as vLLM's."""
        runner = getattr(self, "model_runner", None)
        if isinstance(runner, InPageCPUModelRunner):
            runner.log_counters(at_shutdown=True)
        super().shutdown()


class InPageCPUModelRunner(CPUModelRunner):
    """vLLM's CPU runner with running states in slots and checkpoints in pages."""

    mover: Mover | None = None
    """None until the pool is there, and while vLLM profiles."""
    _step: Any = None
    """The scheduler output that is being executed; None during warm-up and dummy runs."""

    # ------------------------------------------------------------------ the pool
    def initialize_kv_cache_tensors(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Allocate as vLLM does, then move the running states of the GDN layers into slots."""
        kv_caches: dict[str, torch.Tensor] = super().initialize_kv_cache_tensors(kv_cache_config, *args, **kwargs)
        (attention_group,), self._state_groups = group_ids(kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        attention = groups[attention_group]
        pages_at = {
            kv_caches[name].data_ptr(): page_view(kv_caches[name], kv_cache_config.num_blocks, attention.kv_cache_spec)
            for name in attention.layer_names
        }
        geometry = geometry_of(kv_cache_config)
        slots = self.max_num_reqs + 1
        layers = []
        for index, group_id in enumerate(self._state_groups):
            for name in groups[group_id].layer_names:
                pages = pages_at.get(kv_caches[name].data_ptr())
                if pages is None:
                    raise ConfigError(f"GDN layer {name} shares its pages with no attention layer")
                raw = torch.zeros(slots, 1, 1, geometry.state_bytes, dtype=torch.int8)
                self.compilation_config.static_forward_context[name].bind_kv_cache(raw)
                layers.append(LayerStates(name, index, [rows_of_words(raw, slots, f"the slots of {name}")], [pages]))
        self.mover = Mover(
            attention.kv_cache_spec.block_size,
            SlotTable(range(NULL_SLOT + 1, slots)),
            Ledger(kv_cache_config.num_blocks),
            PageStore(layers, [[pages] for pages in pages_at.values()]),
            self.cache_config.prefix_match_unit,
        )
        self._stats = StatsLog(logger, "worker", envs.VLLM_LOG_STATS_INTERVAL)
        self._report = WorkerReport()
        if get_tensor_model_parallel_rank() == 0:
            retention = getattr(self.cache_config, "prefix_cache_retention_interval", None)
            logger.info(start_line(self.mover, layers, kv_cache_config, self.max_model_len, retention))
        return kv_caches

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Nothing to do with in-page: `Mover.before_forward` has zeroed these pages already."""
        if self.mover is None:
            super()._zero_block_ids(block_ids)

    # ------------------------------------------------------------------ a step
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, without its copies of states from block to block."""
        if self.mover is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        began = time.perf_counter()
        self._step = scheduler_output
        try:
            with no_copies():
                output = super().execute_model(scheduler_output, *args, **kwargs)
            return self._report.on(output, self.mover, idle=not scheduler_output.total_num_scheduled_tokens)
        finally:
            self._step = None
            self.mover.counters.step_seconds += time.perf_counter() - began
            self.log_counters()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; its output carries the counters when they are due."""
        output = super().sample_tokens(*args, **kwargs)
        return output if self.mover is None else self._report.on(output, self.mover)

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.mover is not None:
            self.mover.before_forward(step_facts(scheduler_output, self._state_groups))
        return super()._update_states(scheduler_output)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built = super()._build_attention_metadata(*args, **kwargs)
        if self.mover is None or self._step is None:
            return built
        slots = torch.tensor(self.mover.slots_of(self.input_batch.req_ids), dtype=torch.int32)
        seen = set()
        for group_id in self._state_groups:
            for name in self.kv_cache_config.kv_cache_groups[group_id].layer_names:
                metadata = built[0][name]
                if id(metadata) not in seen:
                    seen.add(id(metadata))
                    point_at_slots(metadata, slots)
        return built

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._model_forward(*args, **kwargs)
        if self.mover is not None and self._step is not None:
            self.mover.after_forward(step_runs(self._step.num_scheduled_tokens, self.requests, self._state_groups))
        return output

    # ------------------------------------------------------------------ counters
    def log_counters(self, at_shutdown: bool = False) -> None:
        """One line of running totals, when it is due; rank 0 speaks for all."""
        if self.mover is not None and get_tensor_model_parallel_rank() == 0:
            self._stats.log(self.mover.counters.line, at_shutdown)


def page_view(cache: torch.Tensor, num_blocks: int, spec: Any) -> torch.Tensor:
    """The pages of an attention layer as `[num_blocks, words]` int32, whatever order its rows have inside a page.

    `cache` is the layer's view of the pool, `[num_blocks, ...]`; raises `ConfigError` when a block's bytes do not
    lie together.
    """
    block_stride = cache.stride(0) * cache.element_size()
    if cache.shape[0] != num_blocks or block_stride % WORD or spec.page_size_bytes > block_stride:
        raise ConfigError(
            f"an attention layer's cache of shape {tuple(cache.shape)} and strides {cache.stride()} is not "
            f"{num_blocks} pages of {spec.page_size_bytes} bytes each"
        )
    first = cache.storage_offset() * cache.element_size() // WORD
    words = spec.page_size_bytes // WORD
    storage = cache.untyped_storage()
    return torch.empty(0, dtype=torch.int32).set_(storage, first, (num_blocks, words), (block_stride // WORD, 1))


def point_at_slots(metadata: Any, slots: torch.Tensor) -> None:
    """Make a GDN layer's metadata address slots where vLLM addressed blocks; `slots` is `[requests]` int32."""
    blocks = metadata.non_spec_state_indices_tensor
    if metadata.spec_sequence_masks is not None or blocks.shape != slots.shape:
        raise StateError(
            f"a batch of {slots.shape[0]} requests has state indices of shape {tuple(blocks.shape)}: "
            "padded or speculative batches are not covered"
        )
    metadata.non_spec_state_indices_tensor = slots.to(blocks.dtype)
    if metadata.prefill_state_indices is not None:
        metadata.prefill_state_indices = metadata.non_spec_state_indices_tensor[metadata.num_decodes :]


@contextmanager
def no_copies() -> Iterator[None]:
    """While a step runs, vLLM's own copying is off: of states from block to block, and of blocks (`Mover` does it)."""
    states, blocks = mamba_utils.preprocess_mamba, gpu_model_runner.copy_kv_cache_blocks_inplace
    mamba_utils.preprocess_mamba = gpu_model_runner.copy_kv_cache_blocks_inplace = lambda *args, **kwargs: None
    try:
        yield
    finally:
        mamba_utils.preprocess_mamba, gpu_model_runner.copy_kv_cache_blocks_inplace = states, blocks
