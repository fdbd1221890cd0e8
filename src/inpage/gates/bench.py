"""What every gate works with: the server, the sizes, prompts drawn from the seed, and a judge of its comparisons."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random

from inpage.errors import ConfigError
from inpage.gates.chunks import WHAT_TO_CHANGE, explained_by_a_cold_run
from inpage.gates.client import Generation
from inpage.gates.result import SHOWN_FAILURES, Failure, GateResult, Verdict
from inpage.gates.server import Server, fresh_salt

Tokens = tuple[int, ...]
SIZE_WITHOUT_BLOCK = 256
NO_HITS = (
    "no prompt hits on this server, or nothing says so: prefix caching is off (--enable-prefix-caching), or cached "
    "tokens are neither in usage (--enable-prompt-tokens-details) nor in /metrics"
)


@dataclass(frozen=True)
class Sizes:
    """How much the gates do; a field is an option of `inpage gate` by the same name."""

    prompts: int = 32
    shapes: str = "single,turns,extension,diverging"
    longest: int | None = None
    output: int = 8
    drift_prompts: int = 8
    drift_output: int = 32
    rounds: int = 24
    needle_tokens: int | None = None
    depths: str = "0.1,0.5,0.9"
    preempt_rounds: int = 3
    pool_blocks: int | None = None
    aborts: int = 48
    load_seconds: float = 8.0
    load_threads: int = 4
    vocab: int = 250
    seed: int = 0

    def check(self) -> None:
        """Raise `ConfigError` for a size that is not a positive number."""
        for known in fields(self):
            value = getattr(self, known.name)
            if known.name != "seed" and isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"--{known.name.replace('_', '-')} {value}: must be more than zero")

    def flags(self) -> list[str]:
        """The options that differ from their defaults, as they are typed."""
        words = []
        for known in fields(self):
            value = getattr(self, known.name)
            if value != known.default:
                words += [f"--{known.name.replace('_', '-')}", str(value)]
        return words


@dataclass
class Bench:
    """One gate's view of a run.

    `only_case` restricts the gate to one of its cases; `advance` and `expect` move its progress bar.
    """

    gate: str
    server: Server
    sizes: Sizes
    only_case: int | None = None
    command: tuple[str, ...] = ("inpage", "gate")
    advance: Callable[[], None] = lambda: None
    expect: Callable[[int], None] = lambda total: None

    @property
    def block(self) -> int:
        """The block in tokens; where nothing hits there is none to know, and it only serves as a size."""
        return self.server.about.block_tokens or SIZE_WITHOUT_BLOCK

    @property
    def longest(self) -> int:
        """The longest prompt that a gate should send, in tokens; `ConfigError` when not even two blocks fit."""
        room = (self.server.about.max_model_len or 2**30) - self.sizes.output - 2 * self.block - 2
        longest = min(self.sizes.longest or 5 * self.block, room)
        if longest < 2 * self.block:
            raise ConfigError(
                f"prompts of at most {longest:,} tokens (--longest, max-model-len "
                f"{self.server.about.max_model_len}) do not hold two blocks of {self.block:,}"
            )
        return longest

    def random(self, case: object) -> Random:
        """Random numbers of one case: the same whichever cases run beside it."""
        return Random(f"{self.sizes.seed}/{self.gate}/{case}")

    def tokens(self, rng: Random, count: int) -> Tokens:
        """`count` random token ids."""
        return tuple(rng.randrange(self.sizes.vocab) for _ in range(count))

    def cases(self, count: int) -> Iterator[int]:
        """Indices of the cases to run, moving the progress bar after each."""
        chosen = [index for index in range(count) if self.only_case in (None, index)]
        if not chosen:
            raise ConfigError(f"--case {self.only_case}: the gate {self.gate} has the cases 0 to {count - 1}")
        self.expect(len(chosen))
        for index in chosen:
            yield index
            self.advance()

    def repeat(self, case: int | None = None) -> str:
        """The command that runs this gate, or one case of it, again."""
        block = self.server.about.block_tokens
        words = [*self.command, self.server.about.url, "--only", self.gate, "--seed", str(self.sizes.seed)]
        words += [] if case is None else ["--case", str(case)]
        words += [] if block is None else ["--block", str(block)]
        rest = self.sizes.flags()
        if "--seed" in rest:
            at = rest.index("--seed")
            del rest[at : at + 2]
        return shlex.join([*words, *rest])

    # ------------------------------------------------------------------ requests
    def cold(self, prompt: Sequence[int], output_tokens: int | None = None) -> Generation:
        """The prompt under a salt that nobody has used."""
        return self.server.generate(prompt, fresh_salt(), output_tokens)

    def unrelated(self, rng: Random, tokens: int | None = None) -> None:
        """A prompt that has nothing to do with any other, so that slots and pages change hands."""
        self.cold(self.tokens(rng, tokens or self.block + 16), 2)


class Judge:
    """Collects what a gate saw and makes its verdict.

    | seen                                    | verdict                                             |
    |-----------------------------------------|-----------------------------------------------------|
    | anything wrong                          | fail                                                |
    | a hit that differs from cold, and a     | property of the engine (chunks.py)                  |
    | cold run with other chunks equals it    |                                                     |
    | cold runs that differ among themselves  | not judged: there is nothing exact to be equal to   |
    | a case that did not reach what it is of | not judged                                          |
    | otherwise                               | pass                                                |
    """

    def __init__(self, bench: Bench, by_case: bool = True) -> None:
        """`by_case` is False for gates whose cases only mean something together: all of it is repeated."""
        self.bench = bench
        self.by_case = by_case
        self.figures: dict[str, float | int | str] = {}
        self.failures: list[Failure] = []
        self.failure_count = 0
        self.unsteady: list[str] = []
        self.engine: list[str] = []
        self.unreached: list[str] = []
        self.compared = self.hits = self.equal = 0
        self.worst_drift = 0.0

    def compare(
        self,
        case: int,
        what: str,
        prompt: Sequence[int],
        cold: Generation,
        hit: Generation,
        excusable: bool = True,
    ) -> bool:
        """Judge one hit against its cold run, to the bit; a request that did not hit counts as not reached.

        `excusable` is False where a cold run of now may have gone wrong in the hit's way, so that it excuses nothing.
        """
        if cold.cached_tokens:
            self.unreached.append(
                f"case {case} ({what}): the run under a fresh salt hit {cold.cached_tokens} tokens, so the server "
                "ignores cache_salt and nothing is cold"
            )
            return False
        if not hit.cached_tokens:
            self.unreached.append(f"case {case} ({what}, {len(prompt)} tokens) did not hit")
            return False
        self.hits += 1
        return self.expect_equal(case, what, prompt, cold, hit, excusable)

    def expect_equal(
        self,
        case: int,
        what: str,
        prompt: Sequence[int],
        cold: Generation,
        other: Generation,
        excusable: bool = True,
    ) -> bool:
        """Judge any second answer against a cold one, to the bit; before it fails, the cold run must repeat.

        A hit that differs is then looked for among cold runs with other chunks: nothing but its very answer excuses it.
        """
        self.compared += 1
        if not (cold.finite and other.finite):
            self.fail(case, f"{what}: log probabilities that are not numbers, prompt of {len(prompt)} tokens")
            return False
        drift = other.drift(cold)
        if other.same_as(cold):
            self.equal += 1
            return True
        again = self.bench.cold(prompt, len(cold.tokens))
        if not again.same_as(cold):
            self.unsteady.append(f"case {case} ({what}): two cold runs differ by {again.drift(cold):.3g}")
            return False
        self.worst_drift = max(self.worst_drift, drift)
        looked = 0
        if excusable and other.cached_tokens:
            explained, looked = explained_by_a_cold_run(self.bench, prompt, other)
            if explained:
                self.engine.append(
                    f"case {case} ({what}, {other.cached_tokens} of {len(prompt)} tokens cached) differs from its cold "
                    f"run by {drift:.3g}, and a cold run with other chunk ends gives the hit's answer to the bit"
                )
                return False
        parted = next((i for i, (a, b) in enumerate(zip(cold.tokens, other.tokens, strict=False)) if a != b), None)
        tokens = "tokens equal" if parted is None else f"tokens part at output {parted}"
        self.fail(
            case,
            f"{what}: prompt of {len(prompt)} tokens, {other.cached_tokens or 0} of them cached: {tokens}, logprobs "
            f"off by up to {drift:.3g}, and two cold runs are equal"
            + ("; no cold run with other chunk ends gives this answer" if looked else ""),
        )
        return False

    def fail(self, case: int | None, what: str) -> None:
        """Something was wrong."""
        self.failure_count += 1
        if len(self.failures) < SHOWN_FAILURES:
            self.failures.append(
                Failure(case=case, what=what, repeat=self.bench.repeat(case if self.by_case else None))
            )

    def verdict(self) -> Verdict:
        """As the table of the class has it."""
        if self.failure_count:
            return Verdict.FAIL
        if self.engine:
            return Verdict.ENGINE
        return Verdict.NOT_JUDGED if self.unsteady or self.unreached else Verdict.PASS

    def engine_line(self) -> str | None:
        """The hits that a cold run with other chunks explains, the first in words, and what to change."""
        if not self.engine:
            return None
        more = f" and {len(self.engine) - 1} more" if len(self.engine) > 1 else ""
        return f"{self.engine[0]}{more}; no state is wrong. {WHAT_TO_CHANGE}"

    def missing(self) -> str | None:
        """What could not be reached, the first of each kind in words."""
        parts = []
        for kind in (self.unsteady, self.unreached):
            if kind:
                more = f" and {len(kind) - 1} more" if len(kind) > 1 else ""
                parts.append(f"{kind[0]}{more}")
        if self.unsteady:
            parts.append("a hit has nothing exact to be equal to: keep other load off the server, use one thread")
        return "; ".join(parts) or None

    def result(self, summary: str, seconds: float = 0.0) -> GateResult:
        """The gate's result, with the counts of every comparison among its figures."""
        counts: dict[str, float | int | str] = {}
        if self.compared:
            counts = {"compared": self.compared, "hits": self.hits, "equal": self.equal, "drift": self.worst_drift}
        return GateResult(
            gate=self.bench.gate,
            verdict=self.verdict(),
            summary=summary,
            figures={**counts, **self.figures},
            missing=self.missing(),
            engine=self.engine_line(),
            failures=self.failures,
            failure_count=self.failure_count,
            seconds=seconds,
            repeat=self.bench.repeat(self.bench.only_case),
        )
