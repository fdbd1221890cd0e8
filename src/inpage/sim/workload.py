"""Keeps a `World` busy: sessions that grow and part, and faults at every stage of a request's life."""

from __future__ import annotations

import random

from inpage.sim.folds import VOCABULARY, Transcript, key_of
from inpage.sim.oracle import OracleMismatch
from inpage.sim.world import Entry, World

SHARED_PREFIXES = 2


class Workload:
    """The traffic of one seed, a function of the seed and the knobs alone."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.knobs = world.knobs
        self.source = random.Random(f"workload {seed}")
        self._names = 0
        self._prefixes = [self._tokens(self.knobs.longest_prompt) for _ in range(SHARED_PREFIXES)]
        self._sessions = [self._fresh_session() for _ in range(max(2, self.knobs.sessions))]
        self._session_of: dict[str, int] = {}

    def run(self, steps: int) -> None:
        """Take about `steps` steps, then come to rest."""
        world, knobs, chance = self.world, self.knobs, self.source.random
        kinds = (
            (knobs.abort_rate, self._abort),
            (knobs.force_preempt_rate, world.preempt_all),
            (knobs.busy_reset_rate, self._busy_reset),
            (knobs.idle_rate, self._idle),
            (knobs.drain_rate, world.drain),
        )
        faults = [(rate, fault) for rate, fault in kinds if rate]
        while world.tally.steps < steps:
            while len(world.entries) < knobs.sessions:
                self._submit()
            world.step()
            for rate, fault in faults:
                if chance() < rate:
                    fault()
            for entry in world.ended:
                self._continue(entry)
            world.ended.clear()
        world.run_until_idle()

    # ------------------------------------------------------------------ traffic
    def _tokens(self, count: int) -> list[int]:
        return self.source.choices(range(VOCABULARY), k=count)

    def _fresh_session(self) -> Transcript:
        """A session that begins with one of the shared prefixes, cut anywhere."""
        prefix = self.source.choice(self._prefixes)
        shared = prefix[: self.source.randrange(len(prefix))]
        own = self._tokens(self.source.randrange(1, self.knobs.block_tokens))
        return Transcript(key_of(0, 0), (shared + own)[: self.knobs.longest_prompt])

    def _submit(self) -> None:
        source, knobs = self.source, self.knobs
        number = source.randrange(len(self._sessions))
        session = self._sessions[number]
        length = len(session)
        if source.random() < 0.2:
            # Around a boundary, where one token more or less decides.
            edge = source.randrange(length // knobs.block_tokens + 1) * knobs.block_tokens + source.choice([-1, 0, 1])
            length = min(max(edge, 1), length)
        name = str(self._names)
        self._names += 1
        self._session_of[name] = number
        self.world.submit(
            name,
            session.prefix(length),
            source.randint(1, knobs.longest_output),
            priority=source.randrange(3) if knobs.policy == "priority" else 0,
            salt=source.randint(0, knobs.salts) if source.random() < 0.3 else 0,
            adapter=source.randint(0, knobs.adapters) if source.random() < 0.3 else 0,
        )

    def _continue(self, entry: Entry) -> None:
        """The session goes on from what the request has seen, or begins anew when it has become too long."""
        number = self._session_of.pop(entry.name)
        seen = entry.request.num_tokens
        more = self._tokens(self.source.randint(1, 2 * self.knobs.block_tokens))
        if seen + len(more) > self.knobs.longest_prompt or self.source.random() < 0.05:
            self._sessions[number] = self._fresh_session()
        elif entry.truth.key == key_of(0, 0):
            session = entry.truth.prefix(seen)
            session.extend(more)
            self._sessions[number] = session

    # ------------------------------------------------------------------ faults
    def _abort(self) -> None:
        """One client hangs up, or two at once, whatever their requests are doing; sometimes it does so twice."""
        names = list(self.world.entries)
        if names:
            victims = self.source.sample(names, min(len(names), self.source.choice([1, 1, 2])))
            self.world.abort(*victims)
            if self.source.random() < 0.3:
                self.world.abort(*victims)

    def _busy_reset(self) -> None:
        if self.world.reset_cache() and self.world.scheduler.running:
            raise OracleMismatch("owners", "the cache was reset while requests were running")

    def _idle(self) -> None:
        self.world.run_until_idle()
        if self.source.random() < 0.5 and not self.world.reset_cache():
            raise OracleMismatch("owners", "the cache of an idle server could not be reset")
