"""The invariants of the five rules, under whatever order of events hypothesis can think of.

Symbols for bytes, the real mechanism, a pool so small that blocks change hands all the time. Each step is
also checked by the oracle of `state_toy`: a slot's content equals the fold over exactly the tokens computed,
and a restore from a page without the exact checkpoint would show as a wrong state.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from state_toy import GROUPS, Server, Symbol, SymbolWorld, prompt

from inpage.state.ledger import Attention, Checkpoint

B = 4
SLOTS = 3
PROMPTS = st.tuples(st.integers(0, 2), st.sampled_from([1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 3 * B + 3]))


class Life(RuleBasedStateMachine):
    """Requests come, run, are preempted, resume, finish and are aborted."""

    server: Server
    world: SymbolWorld
    submitted = 0

    @initialize(num_blocks=st.integers(16, 30))
    def start(self, num_blocks):
        self.world = SymbolWorld(B, num_blocks, SLOTS)
        self.server = Server(self.world, num_blocks, SLOTS)

    @precondition(lambda self: len(self.server.waiting) < 4)
    @rule(prompt_of=PROMPTS, outputs=st.integers(1, 6))
    def submit(self, prompt_of, outputs):
        self.submitted += 1
        self.server.submit(f"r{self.submitted}", prompt(*prompt_of), outputs)

    @rule(chunk_blocks=st.integers(1, 3))
    def step(self, chunk_blocks):
        self.server.step(chunk_blocks)

    @rule(chunk_blocks=st.integers(1, 3), data=st.data())
    def step_that_preempts_what_it_has_just_scheduled(self, chunk_blocks, data):
        names = [request.name for request in (*self.server.running, *self.server.waiting)]
        drop = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        self.server.step(chunk_blocks, drop)

    @precondition(lambda self: self.server.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.server.preempt(data.draw(st.sampled_from(self.server.running)).name)

    @precondition(lambda self: self.server.running or self.server.waiting)
    @rule(data=st.data())
    def abort(self, data):
        self.server.abort(data.draw(st.sampled_from([*self.server.running, *self.server.waiting])).name)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort_what_may_have_ended(self, data):
        self.server.abort(f"r{data.draw(st.integers(1, self.submitted))}")

    # ------------------------------------------------------------------------------- invariants
    @invariant()
    def every_slot_is_free_or_held_once(self):
        table = self.server.worker.mover.slots
        assert sorted([*table.free, *table.held.values()]) == list(range(1, SLOTS + 1))

    @invariant()
    def every_block_is_free_or_used_once(self):
        self.server.pool.check_integrity()

    @invariant()
    def a_slot_holds_the_fold_over_exactly_the_tokens_computed(self):
        self.server.worker.check_states("between two steps")
        for request in self.server.running:
            assert self.server.worker.mover.slots.of(request.name).position == request.computed

    @invariant()
    def the_ledger_never_claims_what_a_page_does_not_hold(self):
        ledger = self.server.worker.mover.ledger
        for block, page in self.world.pages.items():
            match ledger.content(block):
                case Checkpoint(position):
                    assert isinstance(page, Symbol)
                    assert len(page.tokens) == position
                    assert position % B == 0
                case Attention():
                    assert isinstance(page, dict)
                    assert block not in self.world.dirty

    @invariant()
    def every_published_and_written_block_holds_what_its_hash_says(self):
        written = self.server.written
        for (kind, tokens), block in self.server.pool.block_of.items():
            page = self.world.pages[block]
            if kind == "attention":
                if written.holds_rows(block, len(tokens)):
                    assert page == dict(enumerate(tokens[-B:]))
            elif written.holds_state(block, len(tokens)):
                assert page == Symbol(int(kind.removeprefix("group ")), tokens)

    @invariant()
    def every_running_request_has_a_block_for_its_last_token_in_every_group(self):
        for request in self.server.running:
            for table in request.states:
                assert len(table) == -(-request.computed // B)
                assert table[-1] != 0
            assert len({block for table in request.states for block in table if block}) >= GROUPS

    def teardown(self):
        if hasattr(self, "server") and not self.server.stopped:
            self.server.run()  # checks that all slots and blocks are home


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
