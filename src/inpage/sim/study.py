"""Recorded sessions through the real scheduler and KV manager, once for each layout and memory size.

Time is the cost model's. Steps in which every request only decodes inside its block allocate nothing and
change no cache, so that they are counted instead of taken; everything else is vLLM's own doing: chunks,
admission, preemption, lookups, eviction.

| arm          | blocks of the pool                        | a hit needs                                        |
|--------------|-------------------------------------------|----------------------------------------------------|
| off          | all memory, one page a block              | nothing hits                                       |
| per-block    | less: every block has a state row beside it | its blocks                                         |
| bounded pool | what K checkpoints leave                  | its blocks, and its checkpoint still among the K   |
| in-page      | all memory, one page a block              | its blocks                                         |

The bounded pool keeps its K checkpoints by LRU, apart from the pool of blocks: only what a lookup could find
is put there, a hit refreshes, and a lookup stops at the longest prefix whose checkpoint is still resident.
What is generated is not what a later prompt contains, so that hits end with the prompts, on the safe side.
"""

from __future__ import annotations

import functools
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inpage.engines.scheduler import SchedulerSide
from inpage.sim import engine
from inpage.sim.arms import Arm, Figures, Server
from inpage.sim.traces import Session
from inpage.state.grid import Grid


class Residency:
    """The bounded pool: which blocks' checkpoints are among the K, by LRU. One of every GDN group makes one."""

    def __init__(self, scheduler: Any, checkpoints: int, state_groups: Sequence[int]) -> None:
        self._room = checkpoints * len(state_groups)
        self._groups = frozenset(state_groups)
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._scheduler = scheduler
        pool = scheduler.kv_cache_manager.block_pool
        pool.get_cached_block = functools.partial(self._get_cached_block, pool.get_cached_block)
        pool.get_new_blocks = functools.partial(self._get_new_blocks, pool.get_new_blocks)

    def _get_cached_block(self, original: Any, block_hash: Any, groups: list[int]) -> Any:
        found = original(block_hash, groups)
        if found and any(
            group in self._groups and block.block_id not in self._lru
            for group, block in zip(groups, found, strict=True)
        ):
            return None
        return found

    def _get_new_blocks(self, original: Any, *args: Any) -> Any:
        blocks = original(*args)
        for block in blocks:
            self._lru.pop(block.block_id, None)
        return blocks

    def used(self, tables: Sequence[Sequence[int]], position: int, block_tokens: int) -> None:
        """A step saved or restored the checkpoint at this position."""
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        for group in self._groups:
            block = tables[group][(position - 1) // block_tokens]
            if block and blocks[block].block_hash is not None:
                self._lru[block] = None
                self._lru.move_to_end(block)
        while len(self._lru) > self._room:
            self._lru.popitem(last=False)


@dataclass
class _Active:
    """A turn in the server."""

    session: int
    turn: int
    request: Any
    arrived: float
    hit: int = 0
    started: bool = False
    answered: bool = False


class Replay:
    """One arm over all sessions."""

    def __init__(self, sessions: Sequence[Session], arm: Arm, server: Server) -> None:
        self.sessions, self.arm, self.server = sessions, arm, server
        self.figures = Figures(arm, sessions=sum(len(session.turns) > 1 for session in sessions))
        grid = Grid(server.block_tokens, server.mark_tokens or server.block_tokens)
        # What a request may hold beside its attention blocks, and the null block.
        room = (arm.num_blocks - 1 - grid.blocks_at_once(0, engine.GROUPS)) * server.block_tokens
        self._longest = min(room, server.max_model_len - 1)
        self.scheduler = engine.build_scheduler(
            engine.EngineSettings(
                block_tokens=server.block_tokens,
                num_blocks=arm.num_blocks,
                budget=server.budget,
                max_num_seqs=server.max_num_seqs,
                # Marks are refused for a pool that cannot hold the longest request.
                max_model_len=min(server.max_model_len, room) if server.mark_tokens else server.max_model_len,
                retention_tokens=server.retention_tokens if arm.caching else None,
                caching=arm.caching,
                mark_tokens=server.mark_tokens if arm.caching else None,
            )
        )
        self.residency: Residency | None = None
        if arm.caching:
            side = SchedulerSide(self.scheduler, "value" if server.by_value else "dense")
            if arm.checkpoints is not None:
                self.residency = Residency(self.scheduler, arm.checkpoints, side.state_groups)
        self.clock = 0.0
        self._active: dict[str, _Active] = {}
        self._arrivals: list[tuple[float, int, int]] = []
        self._unstarted = list(range(len(sessions)))[::-1]
        self._cold_sessions: set[int] = set()
        pool = self.scheduler.kv_cache_manager.block_pool
        pool._maybe_evict_cached_block = functools.partial(self._evict, pool._maybe_evict_cached_block)
        self.scheduler._preempt_request = functools.partial(self._preempt, self.scheduler._preempt_request)

    def run(self) -> Figures:
        """Replay everything; returns the figures."""
        if self.server.at_once:
            for _ in range(self.server.at_once):
                self._start_next(0.0)
        else:
            first = [(one.start + one.turns[0].gap, index, 0) for index, one in enumerate(self.sessions)]
            self._arrivals = sorted(first)
        while self._arrivals or self._active:
            if not self._active:
                self.clock = max(self.clock, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.clock:
                arrived, session, turn = heapq.heappop(self._arrivals)
                self._arrive(arrived, session, turn)
            if self._active:
                self._step()
        self.figures.wall = self.clock
        self.figures.warm_sessions = self.figures.sessions - len(self._cold_sessions)
        return self.figures

    # ------------------------------------------------------------------ sessions
    def _start_next(self, now: float) -> None:
        if self._unstarted and self.server.at_once:
            index = self._unstarted.pop()
            heapq.heappush(self._arrivals, (now, index, 0))

    def _arrive(self, arrived: float, session: int, number: int) -> None:
        turn = self.sessions[session].turns[number]
        self.figures.turns += 1
        self.figures.prompt_tokens += turn.prompt_tokens
        longest = turn.prompt_tokens + turn.output_tokens
        if longest > self._longest:
            self.figures.refused += 1
            self._judge(session, number, 0)
            self._go_on(session, number)
            return
        name = f"{session}/{number}"
        request = engine.make_request(self.scheduler, name, turn.prompt(), turn.output_tokens, arrival=arrived)
        self._active[name] = _Active(session, number, request, arrived)
        self.scheduler.add_request(request)

    def _go_on(self, session: int, number: int) -> None:
        turns = self.sessions[session].turns
        if number + 1 < len(turns):
            heapq.heappush(self._arrivals, (self.clock + turns[number + 1].gap, session, number + 1))
        else:
            self._start_next(self.clock)

    def _judge(self, session: int, number: int, hit: int) -> None:
        """Whether a later turn found what the turn before had in common with it, up to a block."""
        if number:
            turns, block = self.sessions[session].turns, self.server.block_tokens
            ceiling = turns[number].shared_with(turns[number - 1]) // block * block
            if hit < ceiling - block:
                self._cold_sessions.add(session)

    # ------------------------------------------------------------------ steps
    def _step(self) -> None:
        scheduler, figures, block = self.scheduler, self.figures, self.server.block_tokens
        output = scheduler.schedule()
        figures.steps += 1
        for new in output.scheduled_new_reqs:
            active = self._active[new.req_id]
            active.hit = new.num_computed_tokens
            figures.hit_tokens += active.hit
            self._judge(active.session, active.turn, active.hit)
            if active.turn:
                prompt = self.sessions[active.session].turns[active.turn].prompt_tokens
                figures.prefill_a_turn.append(prompt - active.hit)
            if active.hit and self.residency:
                self.residency.used(new.block_ids, active.hit, block)
        names, sampled, prefill, decodes = [], [], 0, False
        for name, tokens in output.num_scheduled_tokens.items():
            request = self._active[name].request
            done = request.num_computed_tokens >= request.num_tokens
            if tokens == 1 and request.num_output_tokens and done:
                decodes = True
            else:
                prefill += tokens
            end = request.num_computed_tokens
            unit = self.server.mark_tokens or block
            if self.residency and (end % block == 0 or (end % unit == 0 and end <= request.num_prompt_tokens)):
                self.residency.used(scheduler.kv_cache_manager.get_block_ids(name), end, block)
            names.append(name)
            sampled.append([_generated(name, request.num_output_tokens)] if done else [])
        if not names:
            # Everything that waits is longer than what is free, and nothing runs that could free it.
            self.clock = max(self.clock + 1 / self.server.costs.decode_rate, self._next_arrival(self.clock))
            return
        figures.prefill_tokens += prefill
        self.clock += self.server.costs.seconds(prefill, decodes)
        scheduler.update_from_output(output, engine.runner_output(names, sampled))
        finished = self._settle(names)
        if not prefill and not finished and len(names) == len(scheduler.running):
            self._count_decodes([self._active[name].request for name in names])

    def _settle(self, names: Sequence[str]) -> bool:
        """Note first tokens and ends; whether a request finished."""
        ended = False
        for name in names:
            active = self._active[name]
            if not active.answered and active.request.num_output_tokens:
                active.answered = True
                if active.turn:
                    self.figures.ttft.append(self.clock - active.arrived)
            if active.request.is_finished():
                ended = True
                del self._active[name]
                self._go_on(active.session, active.turn)
        return ended

    def _next_arrival(self, otherwise: float) -> float:
        return self._arrivals[0][0] if self._arrivals else otherwise

    def _count_decodes(self, requests: Sequence[Any]) -> None:
        """Count the steps up to the next one that could change anything."""
        block = self.server.block_tokens
        steps = min(
            min(
                # The step that ends on a boundary is taken, and so is the one that needs a new block.
                block - request.num_computed_tokens % block - 1 if request.num_computed_tokens % block else 0,
                request.max_tokens - request.num_output_tokens - 1,
            )
            for request in requests
        )
        wait = self._next_arrival(float("inf")) - self.clock
        steps = min(steps, int(min(wait * self.server.costs.decode_rate, 1e9)))
        if steps <= 0:
            return
        for request in requests:
            first = request.num_output_tokens
            request.append_output_token_ids([_generated(request.request_id, first + i) for i in range(steps)])
            request.num_computed_tokens += steps
        self.figures.counted_steps += steps
        self.clock += steps / self.server.costs.decode_rate

    def _evict(self, original: Any, *args: Any) -> Any:
        evicted = original(*args)
        self.figures.evictions += bool(evicted)
        return evicted

    def _preempt(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.figures.preemptions += 1
        return original(*args, **kwargs)


def _generated(name: str, index: int) -> int:
    """A generated token: outside the tokens of prompts, so that it is in none."""
    return 256 + (len(name) + index) % 256
