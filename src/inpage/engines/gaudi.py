"""In-page on vllm-gaudi: workers and model runners.

vllm-gaudi keeps GDN states in slots already ("compact GDN"), a row of the state tensors for every slot and GDN
group. What is added: the slots are handed out by `SlotTable`, so that preemption gives them back, and the pages of
attention, K and V tensors in kernel blocks, hold the checkpoints.

| vllm-gaudi's step       | here                                                                              |
|-------------------------|-----------------------------------------------------------------------------------|
| `initialize_kv_cache`   | pad ids in kernel blocks; slots and pages become the page store; no Mamba2 branch |
| `_update_states`        | preceded by `Mover.before_forward`: hand back, zero, copy, give, restore          |
| `sample_tokens`         | (all forward passes are in it) followed by the saves                              |
| `sleep`                 | lets go of the pages                                                              |

Any attention page of a block will do for a checkpoint, as all of them are unused while a GDN group owns the block:
layer i of a GDN group takes the page of attention layer i. That needs none of the names by which releases differ in
saying which layers share memory (`KVCacheTensor.shared_by`, `.layers`).

Warm-up and dummy steps (`warmup_mode`) run as vllm-gaudi has them, on free slots and the null block.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_gaudi.v1.worker import hpu_model_runner, hpu_worker

from inpage.engines.activation import StatsLog, why_not
from inpage.engines.metrics import WorkerReport
from inpage.engines.scheduler import group_ids, step_facts, step_runs
from inpage.engines.start import start_line
from inpage.errors import ConfigError
from inpage.state.ledger import Ledger
from inpage.state.mover import Mover
from inpage.state.pages import LayerStates, PageStore, rows_of_words
from inpage.state.slots import SlotTable

logger = init_logger("vllm.inpage.worker")

UPSTREAM_WARNING = "Compact GDN mode does not support prefix caching"
RETENTION_ENV = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


# -------------------------------------------------------------------------------------------------- decode padding
def pad_block_id(kv_cache_config: Any, num_blocks: int, kernel_block_tokens: int) -> int:
    """The kernel block that padded decodes may write to: the one past the pool, counted in kernel blocks.

    `num_blocks` is the pool's size in blocks, which is what vllm-gaudi takes for the id. Block tables of a hybrid
    count kernel blocks, several to a block, so that id lies in the middle of the pool.
    """
    groups = kv_cache_config.kv_cache_groups
    sizes = {g.kv_cache_spec.block_size for g in groups if isinstance(g.kv_cache_spec, FullAttentionSpec)}
    if len(sizes) != 1 or (block_tokens := next(iter(sizes))) % kernel_block_tokens:
        raise ConfigError(
            f"attention has blocks of {sorted(sizes)} tokens and kernel blocks of {kernel_block_tokens}: "
            "hybrid-decode-pad covers one block size that is a multiple of the kernel's"
        )
    return num_blocks * (block_tokens // kernel_block_tokens)


class DecodePadModelRunner(hpu_model_runner.HPUModelRunner):
    """vllm-gaudi's runner with decodes padded outside the pool (the fix hybrid-decode-pad)."""

    _PAD_BLOCK_ID: int
    _PAD_SLOT_ID: int

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        """As vllm-gaudi's; then the pad ids of a hybrid are put past the pool."""
        super().initialize_kv_cache(kv_cache_config)
        if self.num_mamba_like_layers > 0:
            self._PAD_BLOCK_ID = pad_block_id(self.kv_cache_config, self._PAD_BLOCK_ID, self.attn_block_size)
            self._PAD_SLOT_ID = self._PAD_BLOCK_ID * self.attn_block_size


class DecodePadHPUWorker(hpu_worker.HPUWorker):
    """vllm-gaudi's worker with another model runner, also when it switches models."""

    runner_class: type[hpu_model_runner.HPUModelRunner] = DecodePadModelRunner

    def init_device(self) -> None:
        """As vllm-gaudi's, with the runner class swapped while it builds its runner."""
        with self._runner_class_swapped():
            super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vllm-gaudi's, which builds another runner when it is given another model."""
        with self._runner_class_swapped():
            super().load_model(*args, **kwargs)

    @contextmanager
    def _runner_class_swapped(self) -> Iterator[None]:
        original = hpu_worker.HPUModelRunner
        hpu_worker.HPUModelRunner = self.runner_class
        try:
            yield
        finally:
            hpu_worker.HPUModelRunner = original


# --------------------------------------------------------------------------------------------------------- in-page
class InPageModelRunner(DecodePadModelRunner):
    """vllm-gaudi's runner with running states in slots and checkpoints in pages."""

    mover: Mover | None = None
    """None until the pool is there, while asleep, and for models that need no in-page."""
    _step: Any = None
    """The scheduler output between `execute_model` and `sample_tokens`; None in warm-up and dummy steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _without_upstream_warning():
            super().__init__(*args, **kwargs)

    # ------------------------------------------------------------------ the pool
    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        """Allocate as vllm-gaudi does, then view slots and pages."""
        self.mover = None
        super().initialize_kv_cache(kv_cache_config)
        if why_not(self.vllm_config) is not None:
            return
        (attention_group,), self._state_groups = group_ids(self.kv_cache_config)
        if self._compact_gdn_group_ids != set(self._state_groups):
            raise ConfigError(
                f"the worker keeps GDN groups {sorted(self._compact_gdn_group_ids)} of {self._state_groups} in slots: "
                f"VLLM_COMPACT_GDN is {os.environ.get('VLLM_COMPACT_GDN')!r} in its environment, it must be 1"
            )
        groups, num_blocks = self.kv_cache_config.kv_cache_groups, self.kv_cache_config.num_blocks
        spec = groups[attention_group].kv_cache_spec
        pages = [self._pages_of(name, num_blocks, spec) for name in groups[attention_group].layer_names]
        layers = [
            LayerStates(name, index, self._slots_of(name, group), self._page_at(pages, position, name))
            for index, group in enumerate(self._state_groups)
            for position, name in enumerate(groups[group].layer_names)
        ]
        # In a batch of one, vllm-gaudi reads this as "Mamba2 with caching" and asks for an aligned context.
        self.use_prefix_caching = False
        self.mover = Mover(
            spec.block_size,
            SlotTable(range(self._gdn_max_reqs)),
            Ledger(num_blocks),
            PageStore(layers, pages),
            getattr(self.cache_config, "prefix_match_unit", None),
        )
        self._stats = StatsLog(logger, "worker", envs.VLLM_LOG_STATS_INTERVAL)
        self._report = WorkerReport()
        if get_tensor_model_parallel_rank() == 0:
            # v0.26.0 has the interval in the environment, if at all.
            retention = getattr(self.cache_config, "prefix_cache_retention_interval", os.environ.get(RETENTION_ENV))
            pads = f"decodes padded with kernel block {self._PAD_BLOCK_ID}"
            line = start_line(self.mover, layers, self.kv_cache_config, self.max_model_len, retention, pads)
            logger.info("%s Prefix caching works with compact GDN.", line)

    def _cache_of(self, name: str) -> list[torch.Tensor]:
        """The tensors that are bound to a layer: K and V, or conv window and ssm matrix."""
        cache = self.vllm_config.compilation_config.static_forward_context[name].kv_cache
        return [tensor for tensor in cache if isinstance(tensor, torch.Tensor)]

    def _pages_of(self, name: str, num_blocks: int, spec: Any) -> list[torch.Tensor]:
        """K's and V's rows of an attention layer as `[num_blocks, words]`; what lies past the pool is for padding."""
        tensors = self._cache_of(name)
        tokens = num_blocks * spec.block_size
        if len(tensors) != 2 or any(tensor.shape[0] < tokens for tensor in tensors):
            raise ConfigError(
                f"attention layer {name} has caches of shapes {[tuple(tensor.shape) for tensor in tensors]}: covered "
                f"are K and V with a row for each of {tokens} tokens"
            )
        return [
            rows_of_words(tensor[:tokens], num_blocks, f"{part} of {name}")
            for part, tensor in zip("KV", tensors, strict=True)
        ]

    @staticmethod
    def _page_at(pages: Sequence[Sequence[torch.Tensor]], position: int, name: str) -> Sequence[torch.Tensor]:
        if position >= len(pages):
            raise ConfigError(
                f"GDN layer {name} is number {position + 1} of its group, but there are only {len(pages)} attention "
                "layers: it has no page for its checkpoints"
            )
        return pages[position]

    def _slots_of(self, name: str, group: int) -> list[torch.Tensor]:
        """A GDN layer's rows in its group, `[slots, words]` for each state tensor.

        The groups interleave: slot s of group g is row s * groups + g + 1. Row 0 is nobody's, the last is padding's.
        """
        groups, offset = self._num_gdn_groups, self._compact_gdn_group_offset[group]
        rows = self._gdn_max_reqs * groups + 2
        views = []
        for tensor in self._cache_of(name):
            if tensor.shape[0] != rows:
                raise ConfigError(
                    f"GDN layer {name} has a state tensor of {tensor.shape[0]} rows; {rows} are needed for "
                    f"{self._gdn_max_reqs} requests in {groups} groups"
                )
            view = rows_of_words(tensor, rows, f"the slots of {name}")
            views.append(view[offset + 1 : rows - 1 : groups])
        return views

    # ------------------------------------------------------------------ a step
    def execute_model(self, scheduler_output: Any, warmup_mode: bool = False) -> Any:
        """As vllm-gaudi's: it brings its states up to date, the forward passes are in `sample_tokens`."""
        self._step = None if warmup_mode or self.mover is None else scheduler_output
        with self._timed():
            output = super().execute_model(scheduler_output, warmup_mode)
        if self._step is None:
            return output
        return self._report.on(output, self.mover, idle=not scheduler_output.num_scheduled_tokens)

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.mover is None or self._step is None:
            return super()._update_states(scheduler_output)
        self.mover.before_forward(step_facts(scheduler_output, self._state_groups))
        # vllm-gaudi looks slots up by request here, in `prepare_mamba_state_idxs` too. It drops the finished, with a
        # warning for one that holds none, and gives slots to those it does not find; afterwards the truth is restored.
        self._gdn_req_to_base_slot = dict.fromkeys(scheduler_output.finished_req_ids, -1) | self.mover.slots.held
        changed = super()._update_states(scheduler_output)
        self._gdn_req_to_base_slot = dict(self.mover.slots.held)
        self._gdn_slot_free_list = list(self.mover.slots.free)
        return changed

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vllm-gaudi's, with all forward passes of the step; then the saves."""
        step, self._step = self._step, None
        if self.mover is None or step is None:
            return super().sample_tokens(grammar_output)
        with self._timed():
            runs = step_runs(step.num_scheduled_tokens, self.requests, self._state_groups)
            output = super().sample_tokens(grammar_output)
            self.mover.after_forward(runs)
        self.log_counters()
        return self._report.on(output, self.mover)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.mover is not None:
                self.mover.counters.step_seconds += time.perf_counter() - began

    def log_counters(self, at_shutdown: bool = False) -> None:
        """One line of running totals, when it is due; rank 0 speaks for all."""
        if self.mover is not None and get_tensor_model_parallel_rank() == 0:
            self._stats.log(self.mover.counters.line, at_shutdown)


class InPageHPUWorker(DecodePadHPUWorker):
    """vllm-gaudi's worker with the in-page model runner."""

    runner_class = InPageModelRunner

    def sleep(self, level: int = 1) -> None:
        """As vllm-gaudi's; the page views would keep the pool's memory from being freed."""
        if isinstance(self.model_runner, InPageModelRunner):
            self.model_runner.mover = None
        super().sleep(level)

    def shutdown(self) -> None:
        """Log the last counters, then as vllm-gaudi's."""
        if isinstance(self.model_runner, InPageModelRunner):
            self.model_runner.log_counters(at_shutdown=True)
        super().shutdown()


@contextmanager
def _without_upstream_warning() -> Iterator[None]:
    """While vllm-gaudi builds its runner it warns of what in-page puts right."""

    def keep(record: logging.LogRecord) -> bool:
        return UPSTREAM_WARNING not in str(record.msg)

    hpu_model_runner.logger.addFilter(keep)
    try:
        yield
    finally:
        hpu_model_runner.logger.removeFilter(keep)
