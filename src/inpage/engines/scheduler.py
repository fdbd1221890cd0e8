"""The scheduler side, in EngineCore: the chunk grid and rule 4.

Two things are put right on every scheduler, whichever class it is of:

- **Grid.** `_mamba_block_aligned_split` ends prefill chunks on multiples of `cache_config.block_size`, but
  that value is reset on some platforms after the pool was built (Gaudi and CPU, once EngineCore is a
  process of its own). The grid is the scheduler's own `block_size`, which is the pool's. A subclass that splits
  by another grid (vllm-gaudi's async scheduler, from v0.30.0 on) only gets to see what vLLM's split has left, so
  that a chunk which reaches a boundary ends on it. What passes a boundary all the same is cut there:

  | a chunk passes a boundary because                                        | cut after              |
  |--------------------------------------------------------------------------|------------------------|
  | a resumed request recomputes up to its last token, and its length is a   | vLLM's split           |
  | multiple of the block: vLLM then takes the end for a prompt's            |                        |
  | an input of the encoder does not fit, and the chunk ends in front of it  | vLLM's encoder budget  |
- **Rule 4.** vLLM publishes a block's hash when it schedules the step that will fill it. If the request is
  preempted within the same `schedule()` call, the block is never filled, yet can be found. A match counts
  only when its blocks are in `WrittenBlocks`:

  | a matched block is                                     | then                                     |
  |--------------------------------------------------------|------------------------------------------|
  | written by a dispatched step                           | it counts                                |
  | unwritten and still owned: this very step will fill it | the request waits for the next step, as  |
  |                                                        | vLLM has it for blocks of GDN groups     |
  | unwritten and free: nothing will ever fill it          | its hash is taken back, it is a miss     |

With `--prefix-match-unit` vLLM publishes a prompt's last mark too; what is written is then known to the token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from inpage.engines.activation import CPU_WORKER, GAUDI_WORKER, StatsLog, switch, why_not
from inpage.engines.evictions import Evictions
from inpage.engines.metrics import SchedulerReport
from inpage.engines.retention import Retention, ValueOrder, retention_wanted
from inpage.errors import ConfigError, StateError
from inpage.layout.geometry import Geometry, state_bytes
from inpage.state.grid import Grid
from inpage.state.plan import Run, Start, StepFacts
from inpage.state.written import WrittenBlocks

logger = init_logger("vllm.inpage.scheduler")

WORKERS = (CPU_WORKER, GAUDI_WORKER)
"""The worker classes that keep states in pages."""


@dataclass
class SchedulerCounters:
    """Running totals of what the scheduler side decided."""

    refused_unwritten: int = 0
    """Matches whose block nothing had written or ever would."""
    deferred: int = 0
    """Requests that waited one step because this step fills the blocks they match."""
    below_block: int = 0
    """Prompts too short to hit: of one block, or one mark, at most."""
    cut: int = 0
    """Chunks that would have passed a boundary, and end on it."""
    attention_only_tokens: int = 0
    """Tokens whose attention blocks were found, but no checkpoint to start from: computed again."""

    def line(self) -> str:
        """One line for a log."""
        return (
            f"refused hits: {self.refused_unwritten} never written; deferred {self.deferred}; "
            f"prompts too short to hit {self.below_block}; chunks cut at a boundary {self.cut}; "
            f"tokens found without a checkpoint {self.attention_only_tokens}"
        )


def group_ids(kv_cache_config: Any) -> tuple[list[int], list[int]]:
    """Ids of the attention groups and of the GDN groups; `ConfigError` for a layout that is not covered."""
    attention, state = [], []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            state.append(index)
        elif isinstance(spec, FullAttentionSpec):
            attention.append(index)
        else:
            raise ConfigError(f"KV cache group {index} is a {type(spec).__name__}; covered are full attention and GDN")
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(attention) != 1 or not state or len(sizes) != 1:
        raise ConfigError(
            f"the pool has {len(attention)} attention groups, {len(state)} GDN groups and block sizes {sorted(sizes)}: "
            "one attention group, at least one GDN group and one block size are covered"
        )
    return attention, state


def geometry_of(kv_cache_config: Any) -> Geometry:
    """The pool's geometry, read off vLLM's own specs."""
    (attention,), state = group_ids(kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    spec, state_spec = groups[attention].kv_cache_spec, groups[state[0]].kv_cache_spec
    return Geometry(
        state_bytes=state_bytes(state_spec.shapes, (dtype.itemsize for dtype in state_spec.dtypes)),
        kv_bytes_per_token=spec.page_size_bytes // spec.block_size,
        block_tokens=spec.block_size,
        attention_layers=len(groups[attention].layer_names),
        gdn_layers=sum(len(groups[group].layer_names) for group in state),
    )


def step_facts(output: Any, state_groups: Sequence[int]) -> StepFacts:
    """A scheduler output as facts: block tables of the GDN groups only."""
    cached = output.scheduled_cached_reqs
    resumed = [request for request in cached.req_ids if request in cached.resumed_req_ids]
    starts = [
        Start(new.req_id, new.num_computed_tokens, [new.block_ids[group] for group in state_groups])
        for new in output.scheduled_new_reqs
    ]
    grown: list[int] = []
    for index, request in enumerate(cached.req_ids):
        tables = cached.new_block_ids[index]
        if request in cached.resumed_req_ids:
            starts.append(Start(request, cached.num_computed_tokens[index], [tables[group] for group in state_groups]))
        elif tables is not None:
            grown += [block for group in state_groups for block in tables[group] if block]
    return StepFacts(
        finished=output.finished_req_ids,
        preempted=output.preempted_req_ids or (),
        resumed=resumed,
        starts=starts,
        new_attention_blocks=output.new_block_ids_to_zero or (),
        new_state_blocks=grown,
        copies=[
            (copy.src_block_id, copy.dst_block_id) for copy in getattr(output, "kv_cache_block_copies", None) or ()
        ],
    )


def step_runs(num_scheduled_tokens: Mapping[str, int], requests: Mapping[str, Any], groups: Sequence[int]) -> list[Run]:
    """What each request computes in a step, from a worker's own requests; block tables of these GDN groups only."""
    return [
        Run(
            request_id,
            requests[request_id].num_computed_tokens,
            tokens,
            [requests[request_id].block_ids[group] for group in groups],
            requests[request_id].num_prompt_tokens,
        )
        for request_id, tokens in num_scheduled_tokens.items()
    ]


class SchedulerSide:
    """Attached to one scheduler; replaces methods on the instance, so that any subclass is reached."""

    def __init__(self, scheduler: Any, retention: Retention | None = None) -> None:
        """`retention` is `value` or `dense` where vLLM keeps every checkpoint; the environment's choice when None."""
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.block_tokens: int = scheduler.block_size
        self.attention_groups, self.state_groups = group_ids(scheduler.kv_cache_config)
        self.grid = Grid(self.block_tokens, getattr(scheduler, "hash_block_size", None) or self.block_tokens)
        self._refuse_small_pool()
        self.written = WrittenBlocks(self.grid)
        self.counters = SchedulerCounters()
        self.evictions = Evictions(self.written.has_state)
        # A hash that rule 4 takes back is not an eviction.
        self._take_back = self.pool._maybe_evict_cached_block
        self.order: ValueOrder | None = None
        if (retention or retention_wanted()) == "value" and self.manager.coordinator.retention_interval is None:
            self.order = ValueOrder(self.pool, self.grid)
        self._stats = StatsLog(logger, "scheduler", envs.VLLM_LOG_STATS_INTERVAL)
        self._report = SchedulerReport()
        self._attach()

    def _refuse_small_pool(self) -> None:
        """With marks a request holds more blocks for a step; vLLM would wait for ever for more than there are."""
        longest = self.scheduler.max_model_len
        needed, usable = self.grid.blocks_at_once(longest, len(self.state_groups)), self.pool.num_gpu_blocks - 1
        if self.grid.has_marks and needed > usable:
            raise ConfigError(
                f"a request of --max-model-len {longest} tokens that starts inside a block holds {needed} blocks at "
                f"once, the pool has {usable}. Lower --max-model-len, give the pool more memory, or serve without "
                "--prefix-match-unit."
            )

    def _attach(self) -> None:
        scheduler, pool, manager = self.scheduler, self.pool, self.manager
        for owner, name, wrapper in (
            (scheduler, "schedule", self._schedule),
            (scheduler, "_mamba_block_aligned_split", self._split),
            (scheduler, "_try_schedule_encoder_inputs", self._encoder_inputs),
            (scheduler, "update_from_output", self._update_from_output),
            (scheduler, "make_stats", self._make_stats),
            (scheduler, "shutdown", self._shutdown),
            (manager, "get_computed_blocks", self._get_computed_blocks),
            (pool, "get_cached_block", self._get_cached_block),
            (pool, "get_new_blocks", self._get_new_blocks),
            (pool, "_maybe_evict_cached_block", self.evictions.evict),
        ):
            setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))
        if self.order is not None:
            for group in self.state_groups:
                states = manager.coordinator.single_type_managers[group]
                states.remove_skipped_blocks = self._retiring(states, states.remove_skipped_blocks, self.order)
        scheduler.inpage = self

    # ------------------------------------------------------------------ the grid
    def _split(
        self,
        original: Callable[..., int],
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        if self.scheduler.block_size != self.block_tokens:
            raise StateError(
                f"the scheduler's block size changed from {self.block_tokens} to {self.scheduler.block_size} tokens "
                "after the pool was built"
            )
        config = self.scheduler.cache_config
        if config.block_size != self.block_tokens:
            logger.warning(
                "inpage: the configuration says blocks of %d tokens, the pool has blocks of %d; prefill chunks end "
                "on the pool's.",
                config.block_size,
                self.block_tokens,
            )
            config.block_size = self.block_tokens
        found = (num_new_local_computed_tokens, num_external_computed_tokens)
        if type(self.scheduler)._mamba_block_aligned_split is not Scheduler._mamba_block_aligned_split:
            num_new_tokens = Scheduler._mamba_block_aligned_split(self.scheduler, request, num_new_tokens, *found)
        return self._cut(request.num_computed_tokens + sum(found), original(request, num_new_tokens, *found))

    def _cut(self, position: int, tokens: int) -> int:
        kept = self.grid.tokens_to_boundary(position, tokens)
        self.counters.cut += kept < tokens
        return kept

    def _encoder_inputs(
        self,
        original: Callable[..., tuple[Any, ...]],
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        inputs, tokens, *rest = original(request, num_computed_tokens, num_new_tokens, *args, **kwargs)
        # Inputs that lie behind the cut are encoded in this step and used from the encoder's cache in the next.
        return inputs, self._cut(num_computed_tokens, tokens), *rest

    # ------------------------------------------------------------------ rule 4
    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        self._dispatch(output)
        for request in output.scheduled_new_reqs:
            if self.order and request.num_computed_tokens:
                index = self.grid.block_index(request.num_computed_tokens)
                self.order.started([request.block_ids[group][index] for group in self.state_groups])
            self.counters.below_block += len(request.prompt_token_ids or ()) <= self.grid.mark_tokens
            self.counters.attention_only_tokens += self._attention_only(request)
        self._stats.log(self.counters.line)
        return output

    def _attention_only(self, new: Any) -> int:
        """Tokens in whole blocks that attention alone had matched beyond the hit, when the request first runs."""
        request = self.scheduler.requests[new.req_id]
        if request.num_preemptions:
            return 0
        # Where attention's own match ended, when that was beyond the hit; otherwise 0.
        found = request.shared_prefix_boundary
        return max(0, found - found % self.block_tokens - new.num_computed_tokens)

    def _dispatch(self, output: Any) -> None:
        """Take down what the step will have written before any later step reads it."""
        if self.grid.has_marks:
            self._dispatch_inside_blocks(output)
        requests, block_tokens, has_marks = self.scheduler.requests, self.block_tokens, self.grid.has_marks
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = requests[request_id]
            # vLLM has advanced the request already.
            end, prompt = request.num_computed_tokens, request.num_prompt_tokens
            if end % block_tokens < tokens or (has_marks and end - tokens < prompt):
                attention, states = self._tables(request_id)
                self.written.dispatched(request_id, end - tokens, tokens, attention, states, prompt)

    def _dispatch_inside_blocks(self, output: Any) -> None:
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            self.written.copied(copy.src_block_id, copy.dst_block_id)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request_id in (*(new.req_id for new in output.scheduled_new_reqs), *resumed):
            end = self.scheduler.requests[request_id].num_computed_tokens
            self.written.started(end - output.num_scheduled_tokens[request_id], self._tables(request_id)[0])

    def _tables(self, request_id: str) -> tuple[list[list[int]], list[list[int]]]:
        """Block tables of the attention groups and of the GDN groups."""
        tables = self.manager.get_block_ids(request_id)
        return [tables[group] for group in self.attention_groups], [tables[group] for group in self.state_groups]

    def _holds(self, block: Any, group: int) -> bool:
        """Whether a block that can be found holds what it is found for."""
        holds = self.written.holds_state if group in self.state_groups else self.written.holds_rows
        return holds(block.block_id, block.block_hash_num_tokens)

    def _get_new_blocks(self, original: Callable[..., Any], num_blocks: int) -> Any:
        if self.order:
            self.order.bring_forward(num_blocks)
        blocks = original(num_blocks)
        self.written.handed_out(block.block_id for block in blocks)
        if self.order:
            self.order.handed_out(blocks)
        return blocks

    def _get_cached_block(self, original: Callable[..., Any], block_hash: Any, group_ids: list[int]) -> Any:
        while blocks := original(block_hash, group_ids):
            orphans = [
                block
                for block, group in zip(blocks, group_ids, strict=True)
                if block.ref_cnt == 0 and not self._holds(block, group)
            ]
            if not orphans:
                break
            for block in orphans:
                self._take_back(block)
            self.counters.refused_unwritten += 1
        return blocks

    def _get_computed_blocks(self, original: Callable[..., Any], request: Any) -> Any:
        result = original(request)
        blocks = result[0].blocks
        self.evictions.found(blocks[group][-1].block_id for group in self.state_groups if blocks[group])
        pending = any(
            not block.is_null and not self._holds(block, group) for group, found in enumerate(blocks) for block in found
        )
        if pending:
            # vLLM lets a request wait for the next step when the last block of a GDN group is in this set;
            # a block of attention that this step fills needs the same patience.
            for group in self.state_groups:
                manager = self.manager.coordinator.single_type_managers[group]
                manager.cached_blocks_this_step.add(blocks[group][-1].block_hash)
            self.counters.deferred += 1
        return result

    # ------------------------------------------------------------------ retention
    def _retiring(self, manager: Any, original: Callable[..., None], order: ValueOrder) -> Callable[..., None]:
        """A GDN group's own, and what a running request has left behind is noted as it goes back to the pool."""

        def remove_skipped_blocks(request_id: str, *args: Any, **kwargs: Any) -> None:
            index = manager.last_state_block_idx.get(request_id)
            left = None if index is None else manager.req_to_blocks[request_id][index]
            original(request_id, *args, **kwargs)
            if left is not None and not left.is_null and manager.req_to_blocks[request_id][index].is_null:
                order.retired(self.scheduler.requests[request_id], left)

        return remove_skipped_blocks

    # ------------------------------------------------------------------ metrics
    def totals(self) -> dict[str, int]:
        """Everything counted on this side, by field of a snapshot."""
        evicted = {
            "evicted_before_hit": self.evictions.before_hit,
            "evicted_after_hit": self.evictions.after_hit,
        }
        return {**vars(self.counters), **evicted}

    def _update_from_output(
        self, original: Callable[..., Any], scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._report.receive(model_runner_output)
        return original(scheduler_output, model_runner_output, *args, **kwargs)

    def _make_stats(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stats = original(*args, **kwargs)
        self._report.add_to(stats, self.totals())
        return stats

    def _shutdown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._stats.log(self.counters.line, at_shutdown=True)
        return original(*args, **kwargs)


def install() -> None:
    """Attach a `SchedulerSide` to every scheduler that is built for a configuration in-page is active for."""
    original = Scheduler.__init__
    if getattr(original, "inpage", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if why_not(self.vllm_config) is not None:
            return
        worker = self.vllm_config.parallel_config.worker_cls
        if worker not in WORKERS:
            raise ConfigError(
                f"{switch()}, but the worker is {worker}, which keeps no states in the pages: the in-page platform "
                f"was not loaded (is VLLM_TARGET_DEVICE or VLLM_PLUGINS set?). Unset it, or serve without {switch()}."
            )
        SchedulerSide(self)

    init.inpage = True  # type: ignore[attr-defined]
    Scheduler.__init__ = init
