"""A toy server for the tests of the state mechanism: no engine, and no torch in this module.

| part of a real server          | here                                                                    |
|--------------------------------|-------------------------------------------------------------------------|
| vLLM's block pool and hashes   | `PoolDouble`, a double of the tests' own                                |
| vLLM's scheduler               | `Server`, a double too: chunks on the grid, preemption, abort           |
| the scheduler side of inpage   | the real `WrittenBlocks`                                                |
| the worker side of inpage      | the real `Mover`, `SlotTable`, `Ledger`, driven by `Worker`             |
| the model and its memory       | a `World`: `SymbolWorld` here, `TensorWorld` in `state_tensors.py`      |

The oracle stands beside every step: each held slot must equal a cold run over exactly the tokens that it
covers, before and after the forward pass, and each output must be that of a cold run. A difference raises
`OracleMismatch`; a refusal of the mechanism raises `StateError`. Nothing else may be raised.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from inpage.errors import StateError
from inpage.state.grid import Grid
from inpage.state.ledger import NULL_BLOCK, Ledger
from inpage.state.mover import Mover, Store
from inpage.state.plan import Run, Start, StepFacts
from inpage.state.slots import SlotTable
from inpage.state.written import WrittenBlocks

GROUPS = 3
"""GDN groups, as in the Qwen hybrids: three GDN layers to each attention layer."""

VOCABULARY = 50


class OracleMismatch(AssertionError):  # noqa: N818 (a mismatch is the word)
    """Something differs from a cold run."""


class World(Protocol):
    """A model with its slots and pages."""

    block_tokens: int
    store: Store

    def forward(self, slot: int, position: int, tokens: Sequence[int], attention: Sequence[int]) -> list[bytes]:
        """Compute `tokens` from `position` on; returns one output per token. Mutates the slot and the pages."""

    def state(self, slot: int) -> object:
        """The state in the slot, comparable to the bit."""

    def cold_state(self, tokens: tuple[int, ...]) -> object:
        """The state after a cold run over `tokens`."""

    def cold_output(self, tokens: tuple[int, ...]) -> bytes:
        """The output of the last of `tokens` in a cold run."""


# ---------------------------------------------------------------------------------------- symbols
class Symbol(NamedTuple):
    """The state of one group's layers: which tokens were folded into it."""

    group: int
    tokens: tuple[int, ...]


GARBAGE = Symbol(-1, (-1,))
"""What uninitialised memory holds."""


class SymbolWorld:
    """Symbols for bytes: a slot holds one `Symbol` per group; a page a `Symbol`, or attention rows by position.

    It is the simulator's kind of `Store`. A row written into a page that was not zeroed leaves a `dirty` page:
    what was there before would turn up in the attention, as NaN does.
    """

    def __init__(self, block_tokens: int, num_blocks: int, slots: int) -> None:
        self.block_tokens = block_tokens
        self.store = self
        self.slots = {slot: [GARBAGE] * GROUPS for slot in range(1, slots + 1)}
        self.pages: dict[int, Symbol | dict[int, int]] = dict.fromkeys(range(num_blocks), GARBAGE)
        self.dirty: set[int] = set()

    # Store
    def save(self, slot: int, blocks: Sequence[int]) -> int:
        for symbol, block in zip(self.slots[slot], blocks, strict=True):
            self._touch(block)
            self.pages[block] = symbol
        return len(blocks)

    def restore(self, slot: int, blocks: Sequence[int]) -> int:
        pages = [self.pages[block] for block in blocks]
        self.slots[slot] = [page if isinstance(page, Symbol) else GARBAGE for page in pages]
        return len(blocks)

    def zero_slot(self, slot: int) -> None:
        self.slots[slot] = [Symbol(group, ()) for group in range(GROUPS)]

    def zero_pages(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._touch(block)
            self.pages[block] = {}
            self.dirty.discard(block)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> int:
        raise AssertionError(f"blocks {copies} are to be copied, but there are no marks here")

    def _touch(self, block: int) -> None:
        if block == NULL_BLOCK:
            raise OracleMismatch("the null block was written")

    # World
    def forward(self, slot: int, position: int, tokens: Sequence[int], attention: Sequence[int]) -> list[bytes]:
        outputs = []
        for here, token in enumerate(tokens, start=position):
            self.slots[slot] = [Symbol(group, (*folded, token)) for group, folded in self.slots[slot]]
            block = attention[here // self.block_tokens]
            self._touch(block)
            rows = self.pages[block]
            if not isinstance(rows, dict):
                rows = self.pages[block] = {}
                self.dirty.add(block)
            rows[here % self.block_tokens] = token
            outputs.append(self._output(self.slots[slot], self._read(attention, here + 1)))
        return outputs

    def _read(self, attention: Sequence[int], length: int) -> list[int]:
        read = []
        for here in range(length):
            block = attention[here // self.block_tokens]
            rows = self.pages[block]
            clean = isinstance(rows, dict) and block not in self.dirty
            read.append(rows.get(here % self.block_tokens, -2) if clean and isinstance(rows, dict) else -1)
        return read

    @staticmethod
    def _output(states: Sequence[Symbol], rows: Sequence[int]) -> bytes:
        return repr(([tuple(state) for state in states], list(rows))).encode()

    def state(self, slot: int) -> tuple[Symbol, ...]:
        return tuple(self.slots[slot])

    def cold_state(self, tokens: tuple[int, ...]) -> tuple[Symbol, ...]:
        return tuple(Symbol(group, tokens) for group in range(GROUPS))

    def cold_output(self, tokens: tuple[int, ...]) -> bytes:
        return self._output(self.cold_state(tokens), tokens)


# ------------------------------------------------------------------------------------- the worker
class Job(NamedTuple):
    """One request's share of a step: the run, its tokens, and all its tokens so far for the oracle."""

    run: Run
    attention: tuple[int, ...]
    tokens: tuple[int, ...]


class Worker:
    """The worker's side of a step around the real `Mover`."""

    def __init__(self, world: World, slots: int, num_blocks: int) -> None:
        self.world = world
        self.mover = Mover(world.block_tokens, SlotTable(range(1, slots + 1)), Ledger(num_blocks), world.store)
        self.tokens: dict[str, tuple[int, ...]] = {}
        """All tokens of each request, for the oracle."""
        self.outputs: dict[str, list[bytes]] = {}

    def step(self, facts: StepFacts, jobs: Sequence[Job]) -> None:
        """Rule 2's order: before, forward, after; the oracle looks where the mechanism has had its say."""
        self.tokens.update((job.run.request, job.tokens) for job in jobs)
        self.mover.before_forward(facts)
        self.check_states("before the forward pass")
        self.forward(jobs)
        self.mover.after_forward([job.run for job in jobs])
        self.check_outputs(jobs)
        self.check_states("after the forward pass")

    def forward(self, jobs: Sequence[Job]) -> None:
        """Compute the runs."""
        slots = self.mover.slots_of(job.run.request for job in jobs)
        for (run, attention, tokens), slot in zip(jobs, slots, strict=True):
            new = tokens[run.position : run.position + run.tokens]
            self.outputs[run.request] = self.world.forward(slot, run.position, new, attention)

    def check_outputs(self, jobs: Sequence[Job]) -> None:
        """Every output equals that of a cold run."""
        for run, _, tokens in jobs:
            for here, output in enumerate(self.outputs[run.request], start=run.position + 1):
                if output != self.world.cold_output(tokens[:here]):
                    raise OracleMismatch(f"output {here} of request {run.request} differs from a cold run")

    def check_states(self, when: str) -> None:
        """Every held slot equals a cold run over the tokens that it covers; no slot is lost."""
        self.mover.check_integrity()
        for request, slot in self.mover.slots.held.items():
            position = self.mover.slots.of(request).position
            if self.world.state(slot) != self.world.cold_state(self.tokens[request][:position]):
                raise OracleMismatch(
                    f"the state of request {request} in slot {slot}, at position {position} {when}, "
                    "differs from a cold run"
                )

    def state(self, request: str) -> object:
        """The state in the request's slot."""
        return self.world.state(self.mover.slots.of(request).index)


# ---------------------------------------------------------------------------------- the scheduler
Key = tuple[str, tuple[int, ...]]
"""What a block hash stands for: the kind of the group, and all tokens up to the block's end."""


class PoolDouble:
    """A double of vLLM's block pool: reference counts, hashes, and eviction of the block freed longest ago."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(NULL_BLOCK + 1, num_blocks))
        self.users: Counter[int] = Counter()
        self.block_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.keeps_stale_hashes = False
        """A fault to inject: hashes survive eviction."""

    def hand_out(self) -> int:
        """The free block that was freed longest ago, to a new owner; its hash is gone."""
        block = self.free.pop(0)
        self.users[block] = 1
        key = self.key_of.pop(block, None)
        if key is not None and self.block_of.get(key) == block and not self.keeps_stale_hashes:
            del self.block_of[key]
        return block

    def hold(self, block: int) -> None:
        """One more user, by a hit."""
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def let_go(self, block: int) -> None:
        """One user less; a block without users may be evicted, and can still be hit until then."""
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]
            self.free.append(block)

    def publish(self, key: Key, block: int) -> None:
        """From now on the block can be found by its hash."""
        self.block_of[key] = block
        self.key_of[block] = key

    def evict_next(self, block: int) -> None:
        """Move a free block to the front of the queue, so that a test can say who gets it."""
        self.free.remove(block)
        self.free.insert(0, block)

    def check_integrity(self) -> None:
        """Free and used blocks together are all blocks but the null block, each once."""
        assert sorted([*self.free, *self.users]) == list(range(NULL_BLOCK + 1, self.num_blocks))


@dataclass
class Request:
    """What the scheduler knows of a request; `tokens` are prompt and outputs."""

    name: str
    tokens: list[int]
    stop: int
    """The request is finished when it has so many tokens."""
    computed: int = 0
    attention: list[int] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])
    """One block table per GDN group, as in vLLM's align mode: null but for the block in which a chunk ended."""


class Server:
    """A double of vLLM's scheduler in align mode, over one real worker side.

    Like vLLM it publishes hashes when it schedules, preempts by recomputation, never hits a whole prompt, and
    reports what happened as sets.
    """

    def __init__(self, world: World, num_blocks: int, slots: int) -> None:
        self.block_tokens = world.block_tokens
        self.pool = PoolDouble(num_blocks)
        self.written = WrittenBlocks(Grid(world.block_tokens, world.block_tokens))
        self.worker = Worker(world, slots, num_blocks)
        self.slots = slots
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.text: dict[str, list[int]] = {}
        """Prompt and outputs of the finished requests."""
        self.started_at: dict[str, list[int]] = {}
        """The position of every start of every request: first the cold start or hit, then the resumptions."""
        self.final_state: dict[str, object] = {}
        """The state of every request after its last run."""
        self.stopped = False
        """A step raised; an engine does not go on from there."""
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._was_preempted: set[str] = set()
        self._new_attention: list[int] = []

    # requests
    def submit(self, name: str, prompt: Sequence[int], outputs: int = 1) -> None:
        """Queue a request."""
        self.waiting.append(Request(name, list(prompt), len(prompt) + outputs))

    def preempt(self, name: str) -> None:
        """Take the request's blocks away; it will start again from whatever hits by then."""
        request = self._pick(self.running, name)
        self._let_go(request)
        request.computed = 0
        self.waiting.insert(0, request)
        self._preempted.add(name)
        self._was_preempted.add(name)

    def abort(self, name: str) -> None:
        """End the request wherever it is; of a request that has ended already, a repetition is harmless."""
        for queue in (self.waiting, self.running):
            if any(request.name == name for request in queue):
                self._let_go(self._pick(queue, name))
        self._finished.add(name)

    @staticmethod
    def _pick(queue: list[Request], name: str) -> Request:
        return queue.pop(next(i for i, request in enumerate(queue) if request.name == name))

    # a step
    def step(self, chunk_blocks: int = 1, drop: Collection[str] = ()) -> None:
        """Schedule, then let the worker execute.

        `drop` names requests that are preempted after they were scheduled in this very step, as vLLM does in
        favour of another request: their hashes are published, but their chunk is never computed.
        """
        scheduled: dict[str, Job] = {}
        grown: dict[str, list[int]] = {}
        starts: dict[str, Start] = {}
        pool_was_dry = False
        for request in list(self.running):
            if request not in self.running:
                continue
            end = self._next_stop(request, chunk_blocks)
            while (fresh := self._allocate(request, end)) is None:
                pool_was_dry = True
                victim = self.running[-1]
                self.preempt(victim.name)
                if victim is request:
                    break
            else:
                scheduled[request.name] = self._job(request, end)
                grown[request.name] = fresh
        while self.waiting and not pool_was_dry and len(self.running) < self.slots:
            request = self.waiting[0]
            self._take_hit(request)
            end = self._next_stop(request, chunk_blocks)
            if self._allocate(request, end) is None:
                self._let_go(request)
                break
            self.running.append(self.waiting.pop(0))
            scheduled[request.name] = self._job(request, end)
            run = scheduled[request.name].run
            starts[request.name] = Start(request.name, run.position, run.tables)
        for name in drop:
            if scheduled.pop(name, None):
                self.preempt(name)
                grown.pop(name, None)
                starts.pop(name, None)
        facts = StepFacts(
            finished=self._finished,
            preempted=self._preempted,
            resumed=self._was_preempted.intersection(starts),
            starts=list(starts.values()),
            new_attention_blocks=self._new_attention,
            new_state_blocks=[block for blocks in grown.values() for block in blocks],
        )
        for start in starts.values():
            self.started_at.setdefault(start.request, []).append(start.position)
        self._dispatch(facts, scheduled)

    def run(self, chunk_blocks: int = 1, limit: int = 1000) -> Server:
        """Step until nothing is left to do and all slots are home; returns itself."""
        for _ in range(limit):
            if not (self.waiting or self.running):
                self.step()  # reports the last finished requests
                self.check_all_home()
                return self
            self.step(chunk_blocks)
        raise AssertionError(f"no end after {limit} steps")

    def _dispatch(self, facts: StepFacts, scheduled: dict[str, Job]) -> None:
        for job in scheduled.values():
            run = job.run
            self.written.dispatched(run.request, run.position, run.tokens, [job.attention], run.tables)
        self._finished, self._preempted, self._new_attention = set(), set(), []
        self.stopped = True
        self.worker.step(facts, list(scheduled.values()))
        self.stopped = False
        for request in list(self.running):
            if request.name in scheduled:
                run = scheduled[request.name].run
                request.computed = run.position + run.tokens
                self.final_state[request.name] = self.worker.state(request.name)
                if request.computed == len(request.tokens):
                    request.tokens.append(zlib.crc32(self.worker.outputs[request.name][-1]) % VOCABULARY)
                if len(request.tokens) == request.stop:
                    self.text[request.name] = request.tokens
                    self.abort(request.name)

    def _next_stop(self, request: Request, chunk_blocks: int) -> int:
        """Up to which token to compute; chunks of a prefill end on boundaries, but for the last."""
        last_boundary = len(request.tokens) // self.block_tokens * self.block_tokens
        if request.computed < last_boundary:
            return min((request.computed // self.block_tokens + chunk_blocks) * self.block_tokens, last_boundary)
        return len(request.tokens)

    @staticmethod
    def _job(request: Request, end: int) -> Job:
        tables = tuple(tuple(table) for table in request.states)
        run = Run(request.name, request.computed, end - request.computed, tables)
        return Job(run, tuple(request.attention), tuple(request.tokens))

    # blocks
    def _key(self, kind: str, request: Request, end: int) -> Key:
        return kind, tuple(request.tokens[:end])

    def _find(self, kind: str, request: Request, end: int) -> int | None:
        block = self.pool.block_of.get(self._key(kind, request, end))
        holds = self.written.holds_rows if kind == "attention" else self.written.holds_state
        return block if block is not None and holds(block, end) else None

    def _take_hit(self, request: Request) -> None:
        """Hold the blocks of the longest hit: written attention blocks up to it, and a written checkpoint at it."""
        ends = range(self.block_tokens, len(request.tokens), self.block_tokens)
        for end in reversed(ends):
            attention = [self._find("attention", request, here) for here in ends if here <= end]
            states = [self._find(f"group {group}", request, end) for group in range(GROUPS)]
            found = [block for block in (*attention, *states) if block is not None]
            if len(found) == len(attention) + GROUPS:
                for block in found:
                    self.pool.hold(block)
                request.attention = found[: len(attention)]
                nulls = [NULL_BLOCK] * (len(attention) - 1)
                request.states = [[*nulls, block] for block in found[len(attention) :]]
                request.computed = end
                return

    def _allocate(self, request: Request, end: int) -> list[int] | None:
        """Blocks to compute up to `end`; returns the new state blocks, None when the pool is dry.

        Frees the state blocks behind the newest checkpoint, as vLLM does, and publishes the hashes of all blocks
        that the step will fill.
        """
        needed = -(-end // self.block_tokens)
        for table in request.states:
            for index in range(max(request.computed - 1, 0) // self.block_tokens):
                if table[index] != NULL_BLOCK:
                    self.pool.let_go(table[index])
                    table[index] = NULL_BLOCK
        grows = [table for table in request.states if len(table) < needed]
        if needed - len(request.attention) + len(grows) > len(self.pool.free):
            return None
        fresh_attention = [self.pool.hand_out() for _ in range(needed - len(request.attention))]
        request.attention += fresh_attention
        self._new_attention += fresh_attention
        fresh = []
        for table in grows:
            fresh.append(self.pool.hand_out())
            table += [*[NULL_BLOCK] * (needed - len(table) - 1), fresh[-1]]
        self.written.handed_out([*fresh_attention, *fresh])
        for index in range(request.computed // self.block_tokens, end // self.block_tokens):
            filled = (index + 1) * self.block_tokens
            self.pool.publish(self._key("attention", request, filled), request.attention[index])
            for group, table in enumerate(request.states):
                if table[index] != NULL_BLOCK:
                    self.pool.publish(self._key(f"group {group}", request, filled), table[index])
        return fresh

    def _let_go(self, request: Request) -> None:
        """Free the request's blocks, the last ones first, so that they are evicted first."""
        for table in (request.attention, *request.states):
            for block in reversed(table):
                if block != NULL_BLOCK:
                    self.pool.let_go(block)
            table.clear()
        request.computed = 0

    # checks
    def checkpoint_of(self, tokens: tuple[int, ...]) -> list[int]:
        """The blocks that are published as the checkpoint after `tokens`, one per group."""
        return [self.pool.block_of[f"group {group}", tokens] for group in range(GROUPS)]

    def check_all_home(self) -> None:
        """No request is left, so every slot and every block is free."""
        self.worker.mover.check_integrity()
        self.pool.check_integrity()
        if len(self.worker.mover.slots.free) != self.slots or self.pool.users:
            raise OracleMismatch(f"slots {self.worker.mover.slots.held} are not home, blocks {self.pool.users} in use")


# --------------------------------------------------------------------------------------- workloads
def prompt(seed: int, length: int) -> tuple[int, ...]:
    """A prompt; the same seed gives prompts that are prefixes of each other."""
    source = random.Random(seed)
    return tuple(source.randrange(VOCABULARY) for _ in range(length))


def everyday(server: Server, seed: int, steps: int = 60) -> Server:
    """A day of an agent server: shared prefixes, hits, decodes over boundaries, preemptions, drops, aborts."""
    source = random.Random(seed)
    block = server.block_tokens
    lengths = [1, block - 1, block, block + 1, 2 * block, 2 * block + 5, 3 * block + 17]
    for number in range(steps):
        if len(server.waiting) < 3:
            server.submit(f"r{number}", prompt(source.randrange(3), source.choice(lengths)), source.choice([1, 3, 9]))
        names = [request.name for request in server.running]
        server.step(source.choice([1, 1, 2]), drop=[name for name in names if source.random() < 0.08])
        for request in list(server.running):
            fate = source.random()
            if fate < 0.06:
                server.preempt(request.name)
            elif fate < 0.10:
                server.abort(request.name)
    return server.run()


def outcome(run: Callable[[], object]) -> str:
    """What became of a run: `passes`, `oracle: ...` or `StateError: ...`."""
    try:
        run()
    except OracleMismatch as mismatch:
        return f"oracle: {mismatch}"
    except StateError as error:
        return f"StateError: {error}"
    return "passes"
