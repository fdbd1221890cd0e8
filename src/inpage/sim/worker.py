"""The worker's side of a step: the real `Mover` around a forward pass over symbols.

It knows only what vLLM sends (`SchedulerOutput`): block tables grow by what is appended to them, a resumed
request's are replaced, and the tokens to decode are those that the worker sampled itself, as in an
asynchronous step. A second rank's slot table is led through the same steps with its sets in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inpage.engines.scheduler import step_facts
from inpage.sim.folds import MODULUS, POWERS, Transcript, sampled_token
from inpage.sim.oracle import OracleMismatch, attention_mismatch, check_slot
from inpage.sim.store import POISON, ZEROS, SymbolStore
from inpage.state.ledger import Ledger
from inpage.state.mover import Mover
from inpage.state.plan import Run, StepFacts, plan_before
from inpage.state.slots import SlotTable


@dataclass
class Resident:
    """A request as the worker knows it.

    `prompt` and `length` count the tokens of its prompt and all that the worker knows; `truth` is the oracle's.
    """

    name: str
    truth: Transcript
    prompt: int
    length: int
    attention: list[int] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)

    def take_tables(self, tables: Any) -> None:
        """Block tables that replace what was there."""
        self.attention = list(tables[0])
        self.states = [list(table) for table in tables[1:]]

    def append_to_tables(self, tables: Any) -> None:
        """Blocks that are added to the tables."""
        self.attention += tables[0]
        for table, blocks in zip(self.states, tables[1:], strict=True):
            table += blocks


class Worker:
    """One rank. `truths` finds the transcript of a request; `oracle` off leaves only inpage's own refusals."""

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        slots: int,
        groups: int,
        truths: Callable[[str], Transcript],
        *,
        oracle: bool = True,
        mark_tokens: int | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.store = SymbolStore(num_blocks, slots, groups)
        self.mover = Mover(block_tokens, SlotTable(range(1, slots + 1)), Ledger(num_blocks), self.store, mark_tokens)
        self.other_rank = SlotTable(range(1, slots + 1))
        self.plan = plan_before
        self.state_groups = range(1, groups + 1)
        self.residents: dict[str, Resident] = {}
        self.checks = 0
        self._truths = truths
        self._oracle = oracle

    def execute(self, output: Any) -> tuple[list[str], list[list[int]]]:
        """Run one step; returns its requests and the tokens sampled for each."""
        facts = step_facts(output, self.state_groups)
        self.mover.before_forward(facts)
        self._follow_on_other_rank(facts)
        positions = self._update(output)
        runs, sampled = [], []
        for name, tokens in output.num_scheduled_tokens.items():
            resident, position = self.residents[name], positions[name]
            runs.append(Run(name, position, tokens, resident.states, resident.prompt))
            sampled.append(self._forward(resident, position, tokens))
        self.mover.after_forward(runs)
        return list(output.num_scheduled_tokens), sampled

    def _update(self, output: Any) -> dict[str, int]:
        """Bring the residents up to date; returns the position at which each scheduled request starts."""
        for name in output.finished_req_ids:
            self.residents.pop(name, None)
        positions: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            prompt = len(new.prompt_token_ids)
            resident = Resident(new.req_id, self._truths(new.req_id), prompt, prompt)
            resident.take_tables(new.block_ids)
            self.residents[new.req_id] = resident
            positions[new.req_id] = new.num_computed_tokens
            self._cut(resident, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            positions[name] = cached.num_computed_tokens[index]
            tables = cached.new_block_ids[index]
            resident = self.residents[name]
            if name in cached.resumed_req_ids:
                resident.take_tables(tables)
                self._cut(resident, positions[name])
                # What the scheduler discarded is unknown again.
                resident.length = resident.prompt + cached.num_output_tokens[index]
            elif tables is not None:
                resident.append_to_tables(tables)
        return positions

    def _cut(self, resident: Resident, position: int) -> None:
        """A start inside a block goes on in a copy of an attention page that may have another request's rows behind."""
        if position % self.block_tokens:
            block = resident.attention[position // self.block_tokens]
            self.store.cut(block, position, resident.truth.folds[position])

    def _forward(self, resident: Resident, position: int, tokens: int) -> list[int]:
        """Compute `tokens` from `position` on: states, attention pages, and a token if nothing is left."""
        slot = self.mover.slots.of(resident.name)
        if self._oracle:
            check_slot(self, resident, position, slot.index, slot.position)
            self.checks += 1
        end = position + tokens
        if end > resident.length:
            raise OracleMismatch(
                "output",
                f"request {resident.name} is to compute tokens up to {end}, but only {resident.length} are known",
                resident.name,
            )
        folds = resident.truth.folds
        power = POWERS.upto(tokens)[tokens]
        chunk = folds[end] - folds[position] * power
        self.store.slots[slot.index] = states = [
            (state * power + chunk) % MODULUS for state in self.store.slots[slot.index]
        ]
        self._attend(resident, position, end)
        if end < resident.length:
            return []
        token = sampled_token(states[0])
        resident.length += 1
        if len(resident.truth) < resident.length:
            resident.truth.extend([sampled_token(resident.truth.state(end, 0))])
        return [token]

    def _attend(self, resident: Resident, position: int, end: int) -> None:
        """Write the rows of [position, end), then read all rows from 0 on."""
        grid = self.mover.grid
        block_tokens, folds, pages = self.block_tokens, resident.truth.folds, self.store.pages
        table = resident.attention
        here = position
        while here < end:
            index = here // block_tokens
            last = min((index + 1) * block_tokens, end)
            block = table[index]
            before = folds[here] if here % block_tokens else ZEROS
            right, rows = pages[block] == before, self.store.rows.get(block)
            self.store.write(block, folds[last] if right else POISON)
            if right and grid.has_marks:
                first_mark = here - here % grid.mark_tokens + grid.mark_tokens
                self.store.rows[block] = (rows or {}) | {
                    mark: folds[mark] for mark in range(first_mark, last + 1, grid.mark_tokens)
                }
            here = last
        if not self._oracle:
            return
        full = end // block_tokens
        read = [pages[block] for block in table[:full]]
        if read != folds[block_tokens : end + 1 : block_tokens] or (
            end % block_tokens and pages[table[full]] != folds[end]
        ):
            raise attention_mismatch(self, resident, end)

    def _follow_on_other_rank(self, facts: StepFacts) -> None:
        """The same hand-backs and gives on a rank whose sets iterate in another order."""
        if not (facts.finished or facts.preempted or facts.resumed or facts.starts):
            return
        moves = self.plan(facts, self.mover.grid)
        self.other_rank.hand_back(sorted(set(moves.hand_back), reverse=True))
        for give in moves.give:
            self.other_rank.give(give.request, give.position)
        if self.other_rank.held != self.mover.slots.held:
            differ = dict(set(self.other_rank.held.items()) ^ set(self.mover.slots.held.items()))
            raise OracleMismatch("ranks", f"two ranks hold different slots: {differ}", next(iter(differ)))
