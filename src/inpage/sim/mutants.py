"""Breaks of the rules, one each, which the oracle must notice: a check that catches nothing proves nothing.

A mutant changes the objects of one `World`. The plan of a step is a function that the mover's module holds, so
that it is put back afterwards. None touches the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from inpage.errors import ConfigError
from inpage.sim.world import World
from inpage.state import mover as mover_module
from inpage.state.mover import Mover
from inpage.state.plan import Give, Run, StepFacts, checkpoint_blocks, plan_before
from inpage.state.slots import SlotTable
from inpage.state.written import WrittenBlocks


@dataclass(frozen=True)
class Mutant:
    """A break, with the rule that it breaks and the knobs that make its damage likely."""

    name: str
    rule: str
    apply: Callable[[World], Any]
    pins: tuple[tuple[str, str], ...] = ()

    @contextmanager
    def __call__(self, world: World) -> Iterator[None]:
        """Break the world while the context is open; what was patched outside of it is put back."""
        self.apply(world)
        try:
            yield
        finally:
            vars(mover_module).update(plan_before=plan_before)


MUTANTS: dict[str, Mutant] = {}


def _mutant(name: str, rule: str, **pins: str) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    def register(apply: Callable[[World], Any]) -> Callable[[World], Any]:
        MUTANTS[name] = Mutant(name, rule, apply, tuple(pins.items()))
        return apply

    return register


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))


def _plan(world: World, change: Callable[[StepFacts, Any], Any]) -> None:
    """Change the moves before the forward pass."""
    world.worker.plan = lambda facts, grid: change(facts, plan_before(facts, grid))
    vars(mover_module).update(plan_before=world.worker.plan)


# ---------------------------------------------------------------------- rule 1: the running state is in its slot
@_mutant("slot not zeroed", "1: a cold start's slot is an empty state")
def _slot_not_zeroed(world: World) -> None:
    world.worker.store.zero_slot = lambda slot: None  # type: ignore[method-assign]


@_mutant("slot shared", "1: a slot is one request's")
def _slot_shared(world: World) -> None:
    slots = world.worker.mover.slots

    def give(original: Callable[..., int], request: str, position: int) -> int:
        original(request, position)
        if len(slots.held) > 1:
            slots.of(request).index = next(iter(slots.held.values()))
        return slots.of(request).index

    _wrap(slots, "give", give)


# ---------------------------------------------------------------------- rule 2: save, restore, exactly where and when
@_mutant("no save", "2: a step that ends on a boundary is saved")
def _no_save(world: World) -> None:
    world.worker.store.save = lambda slot, blocks: 0  # type: ignore[method-assign]


@_mutant("no restore", "2: a hit's checkpoint comes back")
def _no_restore(world: World) -> None:
    world.worker.store.restore = lambda slot, blocks: 0  # type: ignore[method-assign]


@_mutant("save before forward", "2: saved after the step")
def _save_before_forward(world: World) -> None:
    store, mover = world.worker.store, world.worker.mover
    early = {index: list(states) for index, states in enumerate(store.slots)}

    def before(original: Callable[..., None], facts: StepFacts) -> None:
        original(facts)
        early.update({index: list(states) for index, states in enumerate(store.slots)})

    def save(original: Callable[..., int], slot: int, blocks: Sequence[int]) -> int:
        late, store.slots[slot] = store.slots[slot], early[slot]
        copied = original(slot, blocks)
        store.slots[slot] = late
        return copied

    _wrap(mover, "before_forward", before)
    _wrap(store, "save", save)


@_mutant("wrong group", "2: every group's state comes from its own block")
def _wrong_group(world: World) -> None:
    def restore(original: Callable[..., int], slot: int, blocks: Sequence[int]) -> int:
        return original(slot, (blocks[1], blocks[0], *blocks[2:]))

    _wrap(world.worker.store, "restore", restore)


@_mutant("one block early", "2: the checkpoint's block is the one that ends at its position")
def _one_block_early(world: World) -> None:
    def change(facts: StepFacts, moves: Any) -> Any:
        tables = {start.request: start.tables for start in facts.starts}
        grid = world.worker.mover.grid

        def early(give: Give) -> Give:
            position = give.position - grid.block_tokens
            if give.checkpoint is None or position <= 0:
                return give
            return replace(give, checkpoint=checkpoint_blocks(give.request, position, grid, tables[give.request]))

        return replace(moves, give=tuple(map(early, moves.give)))

    _plan(world, change)


@_mutant("saved twice a block", "2: nothing but a boundary is saved")
def _saved_off_boundary(world: World) -> None:
    mover = world.worker.mover

    def after(original: Callable[..., None], runs: Sequence[Run]) -> None:
        original(runs)
        for run in runs:
            # Half a block past a boundary, over the checkpoint that was saved there.
            end, block = run.position + run.tokens, world.knobs.block_tokens
            if end > block and end % block == block // 2:
                blocks = checkpoint_blocks(run.request, end - end % block, mover.grid, run.tables)
                mover.store.save(mover.slots.of(run.request).index, blocks)

    _wrap(mover, "after_forward", after)


@_mutant("page not zeroed", "2: a new attention block is zeroed before its first write")
def _page_not_zeroed(world: World) -> None:
    world.worker.store.zero_pages = lambda blocks: None  # type: ignore[method-assign]


@_mutant("page zeroed late", "2: zeroed before the forward pass, not after it")
def _page_zeroed_late(world: World) -> None:
    mover = world.worker.mover
    late: list[int] = []

    def after(original: Callable[..., None], runs: Sequence[Run]) -> None:
        original(runs)
        for block in late:
            world.worker.store.pages[block] = 0
        late.clear()

    world.worker.store.zero_pages = late.extend  # type: ignore[method-assign, assignment]
    _wrap(mover, "after_forward", after)


# ---------------------------------------------------------------------- marks: checkpoints and hits inside a block
@_mutant("no copy", "2: a block that is shared is copied before it is written")
def _no_copy(world: World) -> None:
    world.worker.store.copy_pages = lambda copies: 0  # type: ignore[method-assign]


@_mutant("copy after forward", "2: blocks are copied before the forward pass")
def _copy_late(world: World) -> None:
    store, mover = world.worker.store, world.worker.mover
    original, late = store.copy_pages, list[tuple[int, int]]()

    def after(after_forward: Callable[..., None], runs: Sequence[Run]) -> None:
        after_forward(runs)
        original(late)
        late.clear()

    def not_yet(copies: Sequence[tuple[int, int]]) -> int:
        late.extend(copies)
        return 0

    store.copy_pages = not_yet  # type: ignore[method-assign]
    _wrap(mover, "after_forward", after)


@_mutant("no save at marks", "2: a step that ends on a mark of its prompt is saved")
def _no_save_at_marks(world: World) -> None:
    def after(original: Callable[..., None], runs: Sequence[Run]) -> None:
        original([replace(run, prompt_tokens=0) for run in runs])

    _wrap(world.worker.mover, "after_forward", after)


@_mutant("wrong mark", "5: a checkpoint is the one of the mark that the step ended on")
def _wrong_mark(world: World) -> None:
    grid = world.worker.mover.grid

    def record(original: Callable[..., None], block: int, position: int) -> None:
        original(block, position - grid.mark_tokens if position % grid.block_tokens else position)

    _wrap(world.worker.mover.ledger, "record_checkpoint", record)


@_mutant("restored past the mark", "2: a request goes on exactly at its mark")
def _restored_past(world: World) -> None:
    grid = world.worker.mover.grid

    def past(give: Give) -> Give:
        return replace(give, position=give.position + grid.mark_tokens) if give.position % grid.block_tokens else give

    _plan(world, lambda facts, moves: replace(moves, give=tuple(map(past, moves.give))))


@_mutant("ledger copies nothing", "5: a copy is known to hold what its source holds")
def _ledger_copies_nothing(world: World) -> None:
    world.worker.mover.ledger.record_copies = lambda copies: None  # type: ignore[method-assign]


# ---------------------------------------------------------------------- hand-back
@_mutant("no hand-back at preemption", "1: preemption hands the slot back")
def _no_hand_back(world: World) -> None:
    _plan(world, lambda facts, moves: replace(moves, hand_back=tuple(facts.finished)))


@_mutant("no hand-back at finish", "1: a finished request hands its slot back")
def _no_hand_back_at_finish(world: World) -> None:
    _plan(world, lambda facts, moves: replace(moves, hand_back=(*facts.preempted, *facts.resumed)))


@_mutant("hand-back unsorted", "order: hand-backs are sorted, so that every rank agrees", max_num_seqs="6")
def _unsorted(world: World) -> None:
    slots: Any = world.worker.mover.slots

    def hand_back(requests: Iterable[str]) -> list[str]:
        holders = [request for request in dict.fromkeys(requests) if slots.holds(request)]
        return [name for request in holders for name in SlotTable.hand_back(slots, [request])]

    slots.hand_back = hand_back


# ---------------------------------------------------------------------- rule 4 and the grid, on the scheduler's side
class Everything(WrittenBlocks):
    """Takes every block for written: what vLLM does by itself."""

    def holds_rows(self, block: int, position: int) -> bool:
        """Yes, where the class says so."""
        return True

    def holds_state(self, block: int, position: int) -> bool:
        """Yes, where the class says so."""
        return True


@_mutant("no rule 4", "4: a hit counts only once its checkpoint is written", policy="priority")
def _no_rule_4(world: World) -> None:
    world.side.written = Everything(world.side.grid)


class EverythingAtMarks(WrittenBlocks):
    """Takes every block for written that is found inside of it."""

    def holds_rows(self, block: int, position: int) -> bool:
        """Yes, where the class says so."""
        return position % self.grid.block_tokens > 0 or super().holds_rows(block, position)

    def holds_state(self, block: int, position: int) -> bool:
        """Yes, where the class says so."""
        return position % self.grid.block_tokens > 0 or super().holds_state(block, position)


@_mutant("no rule 4 at marks", "4: a hit inside a block counts only once it is written", policy="priority")
def _no_rule_4_at_marks(world: World) -> None:
    world.side.written = EverythingAtMarks(world.side.grid)


@_mutant("wrong grid", "5: the chunk grid is the pool's block size", budget="4096")
def _wrong_grid(world: World) -> None:
    scheduler, block = world.scheduler, world.knobs.block_tokens

    def split(request: Any, tokens: int, *args: int, **kwargs: int) -> int:
        # As on a platform that reset the configuration's block size to something smaller.
        start, grid = request.num_computed_tokens + sum(args) + sum(kwargs.values()), block // 2 + 1
        end = (start + tokens) // grid * grid
        return tokens if start >= request.num_prompt_tokens or end <= start else end - start

    scheduler._mamba_block_aligned_split = split


@_mutant("chunk not cut", "5: a chunk ends on the boundary that it would pass", force_preempt_rate="0.1")
def _chunk_not_cut(world: World) -> None:
    world.side._cut = lambda position, tokens: tokens  # type: ignore[method-assign]


# ---------------------------------------------------------------------- retention: an order, and never more
@_mutant("moved while in use", "3: only blocks that nobody uses are moved in the free queue", retention="none")
def _moved_while_in_use(world: World) -> None:
    order: Any = world.side.order

    def take(count: int) -> list[Any]:
        ids = list(order._left_behind)[:count]
        for block_id in ids:
            del order._left_behind[block_id]
        return [order._pool.blocks[block_id] for block_id in ids]

    order.started = lambda checkpoint: None
    order._take = take


# ---------------------------------------------------------------------- rule 5: the ledger
@_mutant("ledger forgets nothing", "5: a block that changes hands is unknown")
def _ledger_remembers(world: World) -> None:
    world.worker.mover.ledger.forget = lambda blocks: None  # type: ignore[method-assign]


@_mutant("ledger believes all", "5: a page is known to hold what was put there")
def _ledger_believes(world: World) -> None:
    mover: Mover = world.worker.mover

    def record(original: Callable[..., None], block: int, position: int) -> None:
        # One table entry off: the neighbour is what the ledger believes to be saved.
        original(block % (world.knobs.num_blocks - 1) + 1, position)

    _wrap(mover.ledger, "record_checkpoint", record)


def find(name: str) -> Mutant:
    """The mutant of this name; raises `ConfigError` for another."""
    if name not in MUTANTS:
        raise ConfigError(f"{name!r} is no mutant; there are {', '.join(sorted(MUTANTS))}")
    return MUTANTS[name]
