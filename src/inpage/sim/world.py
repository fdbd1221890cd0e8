"""A server without a model: the real scheduler with inpage's scheduler side, a `Worker`, and the oracle.

With an asynchronous scheduler one step is in flight: a step is executed after the next one has been
scheduled, and its tokens reach the scheduler after that, as in vLLM's engine core.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inpage.engines.scheduler import SchedulerSide
from inpage.sim import engine, oracle
from inpage.sim.folds import Transcript, key_of
from inpage.sim.knobs import Knobs
from inpage.sim.worker import Worker

AUDIT_EVERY = 16
"""Steps between the checks that walk through the whole pool."""


@dataclass
class Entry:
    """A request as its client knows it. `starts` has the position of every start: the hit, 0 for cold."""

    name: str
    request: Any
    truth: Transcript
    salt: int = 0
    adapter: int = 0
    starts: list[int] = field(default_factory=list)


@dataclass
class Tally:
    """What happened in a run."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborts: int = 0
    preemptions: int = 0
    dropped: int = 0
    """Preemptions that left a published block which nothing had written: the case of rule 4."""
    resets: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    servable: int = 0
    """Pages checked that a hit could have been served from."""


class World:
    """One server. Calls mutate it unless they say otherwise; anything wrong raises."""

    def __init__(self, knobs: Knobs, *, with_oracle: bool = True) -> None:
        self.knobs = knobs
        self.scheduler = engine.build_scheduler(
            engine.EngineSettings(
                block_tokens=knobs.block_tokens,
                num_blocks=knobs.num_blocks,
                budget=knobs.budget,
                max_num_seqs=knobs.max_num_seqs,
                max_model_len=knobs.max_model_len,
                asynchronous=knobs.asynchronous,
                policy=knobs.policy,
                retention_tokens=None if knobs.retention is None else knobs.retention * knobs.block_tokens,
                chunk_limit=knobs.chunk_limit,
                reserve_whole_prompt=knobs.reserve_whole_prompt,
                mark_tokens=knobs.mark_tokens or None,
            )
        )
        self.side = SchedulerSide(self.scheduler, "value")
        self.entries: dict[str, Entry] = {}
        """Requests that are not finished yet."""
        self.ended: list[Entry] = []
        """Requests that finished or were aborted since the caller last emptied this."""
        self.in_flight: deque[Any] = deque()
        self.tally = Tally()
        self.worker = Worker(
            knobs.block_tokens,
            knobs.num_blocks,
            knobs.max_num_seqs,
            engine.GROUPS,
            # A step in flight may start a request that has been aborted meanwhile.
            lambda name: self._truths[name],
            oracle=with_oracle,
            mark_tokens=knobs.mark_tokens or None,
        )
        self._truths: dict[str, Transcript] = {}
        self._folds: dict[bytes, tuple[int, int]] = {}
        self._standing = 0
        self._arrivals = 0
        original = self.scheduler._preempt_request
        self.scheduler._preempt_request = functools.partial(self._preempt, original)

    # ------------------------------------------------------------------ requests
    def submit(
        self,
        name: str,
        prompt: Transcript | Sequence[int],
        output_tokens: int,
        *,
        priority: int = 0,
        salt: int = 0,
        adapter: int = 0,
    ) -> Entry:
        """A client sends a request."""
        key = key_of(salt, adapter)
        if not isinstance(prompt, Transcript) or prompt.key != key:
            prompt = Transcript(key, prompt.tokens if isinstance(prompt, Transcript) else prompt)
        truth = prompt.prefix(len(prompt))
        self._arrivals += 1
        request = engine.make_request(
            self.scheduler,
            name,
            list(truth.tokens),
            output_tokens,
            arrival=float(self._arrivals),
            priority=priority,
            salt=f"salt-{salt}" if salt else None,
            adapter=adapter,
        )
        entry = Entry(name, request, truth, salt, adapter)
        self.entries[name] = entry
        self._truths[name] = truth
        self._learn_hashes(entry)
        self.scheduler.add_request(request)
        self.tally.requests += 1
        self.tally.prompt_tokens += len(truth)
        return entry

    def abort(self, *names: str) -> None:
        """Clients hang up; names of requests that are gone already do no harm."""
        engine.abort(self.scheduler, names)
        for name in names:
            if name in self.entries:
                self.tally.aborts += 1
                self._end(self.entries.pop(name))

    # ------------------------------------------------------------------ steps
    def step(self) -> Any:
        """Schedule a step and execute the one that is due; returns what was scheduled."""
        output = self.schedule()
        if not self.knobs.asynchronous or len(self.in_flight) > 1:
            self.execute()
        return output

    def schedule(self) -> Any:
        """Schedule a step, which is then in flight."""
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        self.tally.steps += 1
        for new in output.scheduled_new_reqs:
            self._record_start(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for name, position in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    self._record_start(name, position)
        self._standing = 0 if output.num_scheduled_tokens or not self.entries else self._standing + 1
        if self._standing > oracle.PATIENCE:
            raise oracle.OracleMismatch(
                "progress", f"nothing was scheduled for {self._standing} steps although {len(self.entries)} wait"
            )
        return output

    def execute(self) -> None:
        """Execute the oldest step in flight and hand its tokens to the scheduler."""
        output = self.in_flight.popleft()
        names, sampled = self.worker.execute(output)
        self.scheduler.update_from_output(output, engine.runner_output(names, sampled))
        for name in names:
            entry = self.entries.get(name)
            if entry is not None and entry.request.is_finished():
                self.tally.finished += 1
                self._end(self.entries.pop(name))
        self.worker.mover.check_integrity()
        if self.tally.steps % AUDIT_EVERY == 0:
            oracle.check_owners(self.scheduler, self.knobs.num_blocks)
            oracle.check_ledger(self.worker)

    def drain(self) -> None:
        """Execute what is in flight, then check every page that a hit could be served from."""
        while self.in_flight:
            self.execute()
        for entry in self.entries.values():
            self._learn_hashes(entry)
        self.tally.servable += oracle.check_servable(
            engine.cached_blocks(self.scheduler), self.side.written, self.worker.store, self._folds
        )

    def run_until_idle(self, limit: int = 100_000) -> None:
        """Step until no request is left; everything must then be home."""
        for _ in range(limit):
            if not self.entries:
                break
            self.step()
        else:
            raise oracle.OracleMismatch("progress", f"requests {list(self.entries)} are not done after {limit} steps")
        self.drain()
        self.step()  # carries the names of the last finished requests to the worker
        self.drain()
        oracle.check_owners(self.scheduler, self.knobs.num_blocks)
        oracle.check_ledger(self.worker)
        oracle.check_home(self.scheduler, self.worker, self.knobs.num_blocks)

    # ------------------------------------------------------------------ faults
    def preempt_all(self) -> None:
        """Preempt every running request and empty the cache, as a weight update does."""
        self.tally.resets += 1
        if not self.scheduler.reset_prefix_cache(reset_running_requests=True):
            raise oracle.OracleMismatch("owners", "the cache could not be reset after all requests were preempted")

    def reset_cache(self) -> bool:
        """Empty the cache; whether vLLM did it. When it refuses, nothing may have changed."""
        before = list(engine.cached_blocks(self.scheduler))
        done = bool(self.scheduler.reset_prefix_cache())
        after = list(engine.cached_blocks(self.scheduler))
        self.tally.resets += done
        if after != ([] if done else before):
            raise oracle.OracleMismatch("owners", f"the cache was {'' if done else 'not '}reset, yet holds {after}")
        return done

    # ------------------------------------------------------------------ what was seen
    def _preempt(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.tally.preemptions += 1
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.tally.dropped += any(
            block.block_hash is not None and not block.is_null and not self.side._holds(block, group)
            for group, manager in enumerate(managers)
            for block in manager.req_to_blocks.get(request.request_id, ())
        )
        return original(request, *args, **kwargs)

    def _record_start(self, name: str, position: int) -> None:
        entry = self.entries[name]
        entry.starts.append(position)
        if position:
            self.tally.hits += 1
            self.tally.hit_tokens += position

    def _end(self, entry: Entry) -> None:
        self._learn_hashes(entry)
        self.ended.append(entry)
        delivered = list(entry.request.all_token_ids)
        if delivered != entry.truth.tokens[: len(delivered)]:
            first = next(i for i, token in enumerate(delivered) if entry.truth.tokens[i : i + 1] != [token])
            raise oracle.OracleMismatch(
                "output",
                f"request {entry.name} got token {delivered[first]} at position {first}, a cold run gives "
                f"{entry.truth.tokens[first : first + 1]}",
                entry.name,
            )

    def _learn_hashes(self, entry: Entry) -> None:
        unit = self.knobs.mark_tokens or self.knobs.block_tokens
        for index, key in enumerate(entry.request.block_hashes):
            position = (index + 1) * unit
            self._folds[bytes(key)] = (entry.truth.folds[position], position)
