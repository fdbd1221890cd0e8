"""The oracle: what a cold run gives, compared with what is there. A difference raises `OracleMismatch`.

| check      | when                  | what must be equal                                                     |
|------------|-----------------------|------------------------------------------------------------------------|
| slot       | before each forward   | the slot and the fold over exactly the tokens computed so far           |
| attention  | in each forward       | every page that the request reads and the rows that a cold run writes   |
| output     | after each step       | the tokens that vLLM delivers and those of a cold run                   |
| ranks      | in each step          | the slot tables of two tensor-parallel ranks                            |
| owners     | every few steps       | tables, reference counts and free blocks of the pool; one kind a block  |
| ledger     | every few steps       | what the ledger says of a page and what the page holds                  |
| servable   | with no step in flight| every page that a hit could be served from, and what its hash stands for |
| home       | at the end            | free slots and blocks, and all of them                                  |
| progress   | always                | some request moves within `PATIENCE` steps                              |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inpage.sim.folds import GROUP_STARTS, MODULUS, POWERS
from inpage.sim.store import describe, state_mark
from inpage.state.ledger import Attention, Checkpoint

if TYPE_CHECKING:
    from inpage.sim.store import SymbolStore
    from inpage.sim.worker import Resident, Worker
    from inpage.state.written import WrittenBlocks

HashFolds = Mapping[bytes, tuple[int, int]]
"""Fold and position by block hash, for every block that a request could have published."""

PATIENCE = 40
"""Steps in which nothing is scheduled although requests wait, before it counts as standing still."""


class OracleMismatch(AssertionError):  # noqa: N818 (a mismatch is the word)
    """Something differs from a cold run, or an invariant does not hold. `check` is a row of the table."""

    def __init__(self, check: str, message: str, request: str = "", block: int | None = None) -> None:
        super().__init__(message)
        self.check = check
        self.request = request
        self.block = block


def expected_states(fold: int, power: int, groups: int) -> list[int]:
    """The states of the first GDN groups where the attention fold is `fold`; `power` is `MULTIPLIER^position`."""
    return [(fold + start * power) % MODULUS for start in GROUP_STARTS[:groups]]


def check_slot(worker: Worker, resident: Resident, position: int, slot: int, held_at: int) -> None:
    """The slot holds the fold over exactly `position` tokens, in every group."""
    fold, power = resident.truth.folds[position], POWERS.upto(position)[position]
    states = worker.store.slots[slot]
    expected = expected_states(fold, power, len(states))
    if states != expected:
        group = next(group for group, state in enumerate(states) if state != expected[group])
        raise OracleMismatch(
            "slot",
            f"request {resident.name} is to compute from position {position}, but GDN group {group}'s state in "
            f"slot {slot} is {states[group]}, not {expected[group]}, that of a cold run (the slot table says position "
            f"{held_at})",
            resident.name,
        )


def attention_mismatch(worker: Worker, resident: Resident, end: int) -> OracleMismatch:
    """Which page is not what a cold run over `end` tokens leaves; called when one is known to differ."""
    block_tokens, folds = worker.block_tokens, resident.truth.folds
    for index, block in enumerate(resident.attention[: -(-end // block_tokens)]):
        last = min((index + 1) * block_tokens, end)
        if worker.store.pages[block] != folds[last]:
            return OracleMismatch(
                "attention",
                f"request {resident.name} reads block {block} for tokens up to {last}, whose page holds "
                f"{describe(worker.store.pages[block])}; a cold run has the fold {folds[last]} there",
                resident.name,
                block,
            )
    return OracleMismatch("attention", f"request {resident.name} has too few blocks for {end} tokens", resident.name)


def check_owners(scheduler: Any, num_blocks: int) -> None:
    """Every block is free or held as often as its reference count says, and by one kind of group."""
    pool = scheduler.kv_cache_manager.block_pool
    held: Counter[int] = Counter()
    kinds: dict[int, int] = {}
    for kind, manager in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers):
        for request, blocks in manager.req_to_blocks.items():
            for block in blocks:
                if block.is_null:
                    continue
                held[block.block_id] += 1
                if kinds.setdefault(block.block_id, kind) != kind:
                    raise OracleMismatch(
                        "owners",
                        f"block {block.block_id} is in tables of groups {kinds[block.block_id]} and {kind}",
                        request,
                        block.block_id,
                    )
    for block in pool.blocks:
        if not block.is_null and block.ref_cnt != held[block.block_id]:
            raise OracleMismatch(
                "owners",
                f"block {block.block_id} is in {held[block.block_id]} tables, its reference count is {block.ref_cnt}",
                block=block.block_id,
            )
    if pool.get_num_free_blocks() + len(held) != num_blocks - 1:
        raise OracleMismatch(
            "owners",
            f"{pool.get_num_free_blocks()} free and {len(held)} held blocks are not the pool's {num_blocks - 1}",
        )


def check_ledger(worker: Worker) -> None:
    """What the ledger claims of a page is so; what it does not know it may not know."""
    for block, page in enumerate(worker.store.pages):
        content = worker.mover.ledger.content(block)
        if isinstance(content, Attention) and page < 0:
            kind = "attention rows"
        elif isinstance(content, Checkpoint) and page >= 0:
            kind = f"the checkpoint of position {content.position}"
        else:
            continue
        raise OracleMismatch(
            "ledger", f"the ledger has {kind} in block {block}, its page holds {describe(page)}", block=block
        )


def check_servable(
    cached: Iterable[tuple[int, bytes, int, int]], written: WrittenBlocks, store: SymbolStore, folds: HashFolds
) -> int:
    """Every page that a hit may be served from is right; returns how many there are.

    `cached` has block, hash, group and position of what the pool would find. No step may be in flight.
    """
    checked = 0
    for block, key, group, complete in cached:
        if not (written.holds_state if group else written.holds_rows)(block, complete):
            continue
        found = folds.get(key)
        if found is None:
            raise OracleMismatch("servable", f"block {block} has a hash of no request's tokens", block=block)
        fold, position = found
        expected = fold
        if group:
            states = expected_states(fold, POWERS.upto(position)[position], group)
            expected = state_mark(group - 1, states[-1])
        page = store.pages[block] if group else store.fold_at(block, position)
        if page != expected:
            raise OracleMismatch(
                "servable",
                f"a hit at position {position} would be served from block {block} of group {group}, whose page holds "
                f"{describe(page)} instead of {describe(expected)}",
                block=block,
            )
        checked += 1
    return checked


def check_home(scheduler: Any, worker: Worker, num_blocks: int) -> None:
    """Nothing runs any more: every slot and every block is free."""
    worker.mover.check_integrity()
    if worker.mover.slots.held:
        raise OracleMismatch("home", f"slots {worker.mover.slots.held} were not handed back at the end")
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    if free != num_blocks - 1:
        raise OracleMismatch("home", f"{free} of the pool's {num_blocks - 1} blocks are free at the end")
