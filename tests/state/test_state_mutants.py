"""Every rule is needed: each one-line break of the real classes is caught, and it is known by what.

A mutant breaks one line by monkeypatch and lives through a scenario. Where a rule is the last line of defence
against something that the other parts never do (a stale hash, a lost step), the scenario injects that fault: the
unbroken rule then refuses with a `StateError`, and without the rule a wrong state is served, which the oracle sees.
The sorting of hand-backs needs two processes: see `test_state_ranks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from state_tensors import BLOCK_TOKENS, Layout, toy_server
from state_toy import Job, Request, Server, Worker, everyday, outcome, prompt

from inpage.state import mover, plan, written
from inpage.state.grid import Grid
from inpage.state.ledger import Ledger
from inpage.state.mover import Mover
from inpage.state.pages import LayerStates, PageStore, _Piece
from inpage.state.plan import BlockTables, Run, StepFacts
from inpage.state.slots import SlotTable
from inpage.state.written import WrittenBlocks

B = BLOCK_TOKENS
Break = Callable[[pytest.MonkeyPatch], None]


# ------------------------------------------------------------------------------------------- scenarios
def everyday_run() -> None:
    """Hits, decodes over boundaries, preemptions, drops, aborts, and pages that change hands."""
    everyday(toy_server(Layout(), num_blocks=26), seed=1, steps=30)


def unwritten_block() -> None:
    """A block with an old checkpoint gets a new owner, who is preempted in the very step that would fill it.

    Its new hash is published, its page still holds the old checkpoint, of the same position.
    """
    server = toy_server(Layout())
    server.submit("old", prompt(0, 2 * B + 1))
    server.run()
    inherited = server.checkpoint_of(prompt(0, 2 * B))
    server.submit("new", prompt(1, B + 5), outputs=B)
    server.step()
    for_attention = server.pool.block_of["attention", prompt(0, 2 * B)]
    for block in (*reversed(inherited), for_attention):
        server.pool.evict_next(block)
    while not server.running or len(server.running[0].tokens) < 2 * B:
        server.step()
    text = tuple(server.running[0].tokens)
    server.step(drop=["new"])
    assert server.checkpoint_of(text) == inherited
    server.abort("new")
    server.submit("next", [*text, 1])
    server.run()


def foreign_page() -> None:
    """A checkpoint is evicted and its page filled by attention; then its prompt comes again."""
    server = toy_server(Layout())
    server.submit("first", prompt(0, B + 1))
    server.run()
    server.pool.evict_next(server.checkpoint_of(prompt(0, B))[0])
    server.submit("other", prompt(1, B + 1))
    server.run()
    server.submit("again", prompt(0, B + 2))
    server.run()


def lost_step() -> None:
    """The scheduler believes that a token was computed which no worker ever saw."""
    server = toy_server(Layout())
    server.submit("a", prompt(0, 5), outputs=9)
    server.step()
    server.running[0].tokens.append(7)
    server.running[0].computed += 1
    server.run()


def slots_run_short() -> None:
    """A request is preempted while all slots are held, and another one starts before it resumes."""
    server = toy_server(Layout(), slots=2)
    for number in range(3):
        server.submit(f"r{number}", prompt(number, 5), outputs=9)
    server.step()
    server.preempt("r1")
    server.waiting.reverse()
    server.run()


def two_prompts() -> None:
    """The same prompt twice."""
    server = toy_server(Layout())
    for name in ("first", "second"):
        server.submit(name, prompt(0, 2 * B + 1))
        server.run()


# ---------------------------------------------------------------------------------------------- faults
def no_fault(patch: pytest.MonkeyPatch) -> None:
    """The scheduler side is sound."""


def stale_hashes(patch: pytest.MonkeyPatch) -> None:
    """The pool does not forget the hash of a block that it hands out, and rule 4, which would notice, is off."""
    open_gate(patch)
    made = Server.__init__

    def with_stale_hashes(self: Server, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        self.pool.keeps_stale_hashes = True

    patch.setattr(Server, "__init__", with_stale_hashes)


def open_gate(patch: pytest.MonkeyPatch) -> None:
    """Rule 4 is off: every match is a hit."""
    patch.setattr(WrittenBlocks, "holds_rows", lambda self, block, position: True)
    patch.setattr(WrittenBlocks, "holds_state", lambda self, block, position: True)


def null_tables(patch: pytest.MonkeyPatch) -> None:
    """A group's tables reach the worker with the null block where the checkpoint belongs."""
    made = Server._job

    def with_null(request: Request, end: int) -> Job:
        job = made(request, end)
        first, second, third = job.run.tables
        return job._replace(run=replace(job.run, tables=(first, (*second[:-1], 0), third)))

    patch.setattr(Server, "_job", staticmethod(with_null))


def off_grid_hits(patch: pytest.MonkeyPatch) -> None:
    """A hit counts some tokens behind its last block."""
    take_hit = Server._take_hit

    def with_more(self: Server, request: Request) -> None:
        take_hit(self, request)
        if request.computed:
            request.computed -= 7

    patch.setattr(Server, "_take_hit", with_more)


def unreported_preemptions(patch: pytest.MonkeyPatch) -> None:
    """The facts never say who was preempted or resumed."""
    planned = mover.plan_before
    patch.setattr(mover, "plan_before", lambda facts, b: planned(replace(facts, preempted=(), resumed=()), b))


# ------------------------------------------------------------------------------------ breaks of the copies
def patched(owner: object, name: str, replacement: object) -> Break:
    return lambda patch: patch.setattr(owner, name, replacement)


def nothing(*args: object) -> int:
    return 0


def groups_turned(name: str) -> Break:
    original: Callable[[PageStore, int, Sequence[int]], int] = getattr(PageStore, name)
    return patched(PageStore, name, lambda self, slot, blocks: original(self, slot, [*blocks[1:], blocks[0]]))


def copy_through(arithmetic: Callable[[torch.Tensor], torch.Tensor], name: str) -> Break:
    def words(piece: _Piece, slot: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            piece.slot_part[slot].narrow(0, piece.slot_from, piece.words),
            piece.page_part[block].narrow(0, piece.page_from, piece.words),
        )

    def copy(self: LayerStates, slot: int, block: int) -> None:
        for piece in self._pieces:
            in_slot, in_page = words(piece, slot, block)
            source, target = (in_slot, in_page) if name == "save" else (in_page, in_slot)
            target.copy_(arithmetic(source))

    return patched(LayerStates, name, copy)


def through_times_one(words: torch.Tensor) -> torch.Tensor:
    return (words.view(torch.float32) * 1.0).view(torch.int32)


def through_plus_zero(words: torch.Tensor) -> torch.Tensor:
    """As `through_times_one`, for -0.0 alone: NaNs keep their bits."""
    floats = words.view(torch.float32)
    return torch.where(floats.isnan(), words, (floats + 0.0).view(torch.int32))


def through_quieted_nans(words: torch.Tensor) -> torch.Tensor:
    """The one bit that tells a signalling NaN from a quiet one."""
    return torch.where(words.view(torch.float32).isnan(), words | 0x00400000, words)


def through_float_cast(words: torch.Tensor) -> torch.Tensor:
    return words.float().to(torch.int32)


def through_bfloat16(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.float32).bfloat16().float().view(torch.int32)


def first_pieces_only(patch: pytest.MonkeyPatch) -> None:
    cut = LayerStates._cut
    patch.setattr(LayerStates, "_cut", lambda self: cut(self)[:-1])


def one_layer_less(patch: pytest.MonkeyPatch) -> None:
    save = PageStore.save

    def partial(self: PageStore, slot: int, blocks: Sequence[int]) -> int:
        kept, self.layers = self.layers, self.layers[:-1]
        copied = save(self, slot, blocks)
        self.layers = kept
        return copied

    patch.setattr(PageStore, "save", partial)


def zero_in_part(layers: slice, parts: slice) -> Break:
    def zero_pages(self: PageStore, blocks: Sequence[int]) -> None:
        for tensors in self.attention_pages[layers]:
            for tensor in tensors[parts]:
                tensor[list(blocks)] = 0

    return patched(PageStore, "zero_pages", zero_pages)


# -------------------------------------------------------------------------------------- breaks of the order
def save_before_forward(patch: pytest.MonkeyPatch) -> None:
    def forward_last(self: Worker, facts: StepFacts, jobs: Sequence[Job]) -> None:
        self.tokens.update((job.run.request, job.tokens) for job in jobs)
        self.mover.before_forward(facts)
        self.check_states("before the forward pass")
        self.mover.after_forward([job.run for job in jobs])
        self.forward(jobs)
        self.check_outputs(jobs)
        self.check_states("after the forward pass")

    patch.setattr(Worker, "step", forward_last)


def give_before_hand_back(patch: pytest.MonkeyPatch) -> None:
    before = Mover.before_forward

    def reversed_order(self: Mover, facts: StepFacts) -> None:
        before(self, replace(facts, finished=(), preempted=(), resumed=()))
        before(self, StepFacts(finished=facts.finished, preempted=facts.preempted, resumed=facts.resumed))

    patch.setattr(Mover, "before_forward", reversed_order)


def zero_after_forward(patch: pytest.MonkeyPatch) -> None:
    before, after = Mover.before_forward, Mover.after_forward
    late: list[int] = []

    def without_zeroing(self: Mover, facts: StepFacts) -> None:
        late.extend(facts.new_attention_blocks)
        before(self, replace(facts, new_attention_blocks=()))

    def with_zeroing(self: Mover, runs: Sequence[Run]) -> None:
        after(self, runs)
        self.store.zero_pages(late)
        late.clear()

    patch.setattr(Mover, "before_forward", without_zeroing)
    patch.setattr(Mover, "after_forward", with_zeroing)


# -------------------------------------------------------------------------------------- breaks of the plan
def off_by_one(step: int) -> Break:
    def shifted(request: str, position: int, grid: Grid, tables: BlockTables) -> tuple[int, ...]:
        return plan_checkpoint_blocks(request, position + step * grid.block_tokens, grid, tables)

    def both(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(plan, "checkpoint_blocks", shifted)
        patch.setattr(written, "checkpoint_blocks", shifted)

    plan_checkpoint_blocks = plan.checkpoint_blocks
    return both


def off_by_one_when_saving(patch: pytest.MonkeyPatch) -> None:
    """Saves go where the checkpoint before would be, restores do not."""
    after = mover.plan_after

    def shifted(runs: Sequence[Run], grid: Grid) -> tuple[plan.Save, ...]:
        tables = {run.request: run.tables for run in runs}
        return tuple(
            replace(
                save, checkpoint=tuple(table[save.position // grid.block_tokens - 2] for table in tables[save.request])
            )
            for save in after(runs, grid)
        )

    patch.setattr(mover, "plan_after", shifted)


def boundary_check_removed(patch: pytest.MonkeyPatch) -> None:
    """A start off the grid is planned as one on the boundary before it."""
    before = mover.plan_before

    def floored(facts: StepFacts, grid: Grid) -> plan.BeforeMoves:
        block_tokens = grid.block_tokens
        starts = [replace(start, position=start.position // block_tokens * block_tokens) for start in facts.starts]
        moves = before(replace(facts, starts=starts), grid)
        gives = zip(moves.give, facts.starts, strict=True)
        return replace(moves, give=tuple(replace(give, position=start.position) for give, start in gives))

    patch.setattr(mover, "plan_before", floored)


def preemptions_not_planned(patch: pytest.MonkeyPatch) -> None:
    before = mover.plan_before
    patch.setattr(mover, "plan_before", lambda facts, grid: before(replace(facts, preempted=()), grid))


# ------------------------------------------------------------------------------- breaks of slots and ledger
def hand_back_loses_slots(self: SlotTable, requests: Sequence[str]) -> list[str]:
    return [request for request in sorted(set(requests)) if self._held.pop(request, None)]


def hand_back_forgets_the_holder(self: SlotTable, requests: Sequence[str]) -> list[str]:
    holders = sorted(request for request in set(requests) if request in self._held)
    self._free += [self._held[request].index for request in holders]
    return holders


def held_check_removed(patch: pytest.MonkeyPatch) -> None:
    give = SlotTable.give

    def trusting(self: SlotTable, request: str, position: int) -> int:
        self._held.pop(request, None)
        return give(self, request, position)

    patch.setattr(SlotTable, "give", trusting)


def position_check_removed(patch: pytest.MonkeyPatch) -> None:
    after = Mover.after_forward

    def trusting(self: Mover, runs: Sequence[Run]) -> None:
        for run in runs:
            self.slots.of(run.request).position = run.position
        after(self, runs)

    patch.setattr(Mover, "after_forward", trusting)


def dispatched_adds_everything(self: WrittenBlocks, *step: object) -> None:
    attention_tables, state_tables = step[3:5]
    for tables, position_of in ((attention_tables, self._rows), (state_tables, self._states)):
        for table in tables:  # type: ignore[attr-defined]
            position_of.update({block: (index + 1) * self.grid.block_tokens for index, block in enumerate(table)})


# ------------------------------------------------------------------------------------------- the mutants
@dataclass(frozen=True)
class Mutant:
    """One break; `unbroken` is what the scenario comes to without it, `caught_by` with it (regular expressions)."""

    name: str
    break_it: Break
    caught_by: str
    scenario: Callable[[], None] = everyday_run
    fault: Break = no_fault
    unbroken: str = "passes"

    def __str__(self) -> str:
        return self.name


WRONG_STATE = "oracle: the state of request"
WRONG_OUTPUT = "oracle: output"
UNKNOWN_PAGE = "StateError: .* whose page holds something unknown"

COPIES = [
    Mutant("no bytes saved", patched(PageStore, "save", nothing), WRONG_STATE),
    Mutant("no bytes restored", patched(PageStore, "restore", nothing), WRONG_STATE),
    Mutant("no save planned", patched(mover, "plan_after", lambda runs, b: ()), UNKNOWN_PAGE),
    Mutant("no zeroing of a given slot", patched(PageStore, "zero_slot", nothing), WRONG_STATE),
    Mutant("no zeroing of a new attention page", patched(PageStore, "zero_pages", nothing), WRONG_OUTPUT),
    Mutant("zeroing in the first attention layer only", zero_in_part(slice(1), slice(None)), WRONG_OUTPUT),
    Mutant("zeroing of K only", zero_in_part(slice(None), slice(1)), WRONG_OUTPUT),
    Mutant("zeroing of V only", zero_in_part(slice(None), slice(1, 2)), WRONG_OUTPUT),
    Mutant("wrong group in save", groups_turned("save"), WRONG_STATE),
    Mutant("wrong group in restore", groups_turned("restore"), WRONG_STATE),
    Mutant("a partial copy: the last piece is missing", first_pieces_only, WRONG_STATE),
    Mutant("a partial copy: the last layer is missing", one_layer_less, WRONG_STATE),
    *(
        Mutant(f"{name} {arithmetic.__name__.replace('_', ' ')}", copy_through(arithmetic, name), WRONG_STATE)
        for name in ("save", "restore")
        for arithmetic in (
            through_times_one,
            through_plus_zero,
            through_quieted_nans,
            through_float_cast,
            through_bfloat16,
        )
    ),
]

ORDER = [
    Mutant("save before forward", save_before_forward, WRONG_STATE),
    Mutant("give before hand-back", give_before_hand_back, "StateError: .* is scheduled but holds no slot"),
    Mutant("zeroing after forward", zero_after_forward, WRONG_OUTPUT),
]

PLAN = [
    Mutant(
        "checkpoint blocks one too early",
        off_by_one(-1),
        "StateError: .* has no block for the checkpoint of position 0",
    ),
    Mutant(
        "checkpoint blocks one too late", off_by_one(1), "StateError: .* has no block for the checkpoint of position"
    ),
    Mutant("checkpoint blocks one too early in saves", off_by_one_when_saving, UNKNOWN_PAGE),
    Mutant(
        "start off a boundary not refused",
        boundary_check_removed,
        "StateError: the checkpoint of request second at position 41 is the null block",
        two_prompts,
        off_grid_hits,
        "StateError: request second starts at position 41, 17 tokens past the boundary 24",
    ),
]

SLOTS = [
    Mutant("no hand-back", patched(SlotTable, "hand_back", lambda self, requests: []), "StateError: no slot for"),
    Mutant("hand-backs lose slots", patched(SlotTable, "hand_back", hand_back_loses_slots), "StateError: slots lost"),
    Mutant(
        "no hand-back at preemption", preemptions_not_planned, "StateError: no slot for request r2", slots_run_short
    ),
    Mutant(
        "hand-backs keep the holder",
        patched(SlotTable, "hand_back", hand_back_forgets_the_holder),
        "StateError: slots lost or doubled",
    ),
    Mutant(
        "second slot not refused",
        held_check_removed,
        "StateError: slots lost or doubled",
        fault=unreported_preemptions,
        unbroken="StateError: .* while it still holds slot",
    ),
    Mutant(
        "position check removed",
        position_check_removed,
        WRONG_OUTPUT,
        lost_step,
        unbroken="StateError: request a computed tokens from position 6, but the state in its slot 1 covers 5",
    ),
]

LEDGER = [
    Mutant(
        "ledger check removed",
        patched(Ledger, "check_restorable", nothing),
        WRONG_STATE,
        foreign_page,
        stale_hashes,
        "StateError: request again starts at position 24 from block .*, whose page holds attention rows",
    ),
    Mutant(
        "forget removed",
        patched(Ledger, "forget", nothing),
        WRONG_STATE,
        unwritten_block,
        open_gate,
        "StateError: request next starts at position 48 from block .*, whose page holds something unknown",
    ),
    Mutant(
        "attention not recorded",
        patched(Ledger, "record_attention", nothing),
        WRONG_STATE,
        foreign_page,
        stale_hashes,
        "StateError: .* whose page holds attention rows",
    ),
    Mutant(
        "null block not refused",
        patched(Ledger, "check_block", nothing),
        "oracle: the null block was written",
        two_prompts,
        null_tables,
        r"StateError: the checkpoint of request first at position 24 is the null block \(id 0\)",
    ),
]

WRITTEN = [
    Mutant("every match is a hit", open_gate, UNKNOWN_PAGE, unwritten_block),
    Mutant(
        "dispatched adds everything",
        patched(WrittenBlocks, "dispatched", dispatched_adds_everything),
        UNKNOWN_PAGE,
        unwritten_block,
    ),
    Mutant(
        "blocks with a new owner stay written",
        patched(WrittenBlocks, "handed_out", nothing),
        UNKNOWN_PAGE,
        unwritten_block,
    ),
]

MUTANTS = [*COPIES, *ORDER, *PLAN, *SLOTS, *LEDGER, *WRITTEN]


@pytest.mark.parametrize(
    "scenario", [everyday_run, unwritten_block, foreign_page, slots_run_short, two_prompts], ids=lambda s: s.__name__
)
def test_the_unbroken_rules_pass(scenario):
    assert outcome(scenario) == "passes"


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.fault is not no_fault], ids=str)
def test_the_unbroken_rules_refuse_the_fault(mutant, monkeypatch):
    mutant.fault(monkeypatch)
    assert_outcome(mutant.scenario, mutant.unbroken)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_is_caught(mutant, monkeypatch, record_property):
    mutant.fault(monkeypatch)
    mutant.break_it(monkeypatch)
    record_property("caught by", assert_outcome(mutant.scenario, mutant.caught_by))


def assert_outcome(scenario: Callable[[], None], expected: str) -> str:
    found = outcome(scenario)
    assert re.match(expected, found), found
    return found
