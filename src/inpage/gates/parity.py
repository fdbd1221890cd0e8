"""Greedy parity: a hit must equal a cold run, every token and every logprob, to the bit.

Prompts come in four shapes. Each is sent twice under a `cache_salt` of its own, which keeps the runs of one
prompt among themselves: first cold, then again, with an unrelated prompt in between so that slots and pages
change hands. What must hit first is sent once to fill the cache ("fill"):

| shape     | fill                        | then, hit and cold                                   |
|-----------|-----------------------------|------------------------------------------------------|
| single    | the prompt                  | the same prompt                                      |
| turns     | the conversation so far     | the conversation and the next turn                   |
| extension | a prompt                    | the prompt and a little more than a block            |
| diverging | a prompt                    | its first two thirds, then something else            |

One block a chunk on the server (`--max-num-batched-tokens` below two blocks) makes both runs compute every
chunk with the same shapes; otherwise kernels may round differently without any state being wrong.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inpage.errors import ConfigError
from inpage.gates.bench import Bench, Judge
from inpage.gates.client import Completions, Generate, Generation
from inpage.gates.result import GateResult

SHAPES = ("single", "turns", "extension", "diverging")


@dataclass(frozen=True)
class Case:
    """What fills the cache, and the prompt that then hits; token ids."""

    shape: str
    fill: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """One case: the cold answer, the answer after the fill, and whether the latter hit at all."""

    case: Case
    cold: Generation
    hit: Generation

    @property
    def reached(self) -> bool:
        """Whether the second run really hit the cache."""
        return bool(self.hit.cached_tokens)

    @property
    def equal(self) -> bool:
        """Whether hit equals cold to the bit."""
        return self.hit.same_as(self.cold)


@dataclass(frozen=True)
class Parity:
    """All cases of a run."""

    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Cases whose second run hit the cache."""
        return sum(comparison.reached for comparison in self.comparisons)

    @property
    def equal(self) -> int:
        """Cases that hit and equal their cold run."""
        return sum(comparison.reached and comparison.equal for comparison in self.comparisons)

    @property
    def worst_drift(self) -> float:
        """The largest difference of a log probability between hit and cold."""
        return max((c.hit.drift(c.cold) for c in self.comparisons if c.reached), default=0.0)

    @property
    def exact(self) -> bool:
        """Every case hit, and every hit equals cold. A run without hits proves nothing and is not exact."""
        return bool(self.comparisons) and self.equal == len(self.comparisons)


def make_cases(
    count: int,
    block_tokens: int,
    longest_tokens: int,
    vocab: int,
    seed: int = 0,
    shapes: Sequence[str] = SHAPES,
) -> list[Case]:
    """`count` cases over the shapes, filled with a little over one block to `longest_tokens`."""
    rng = random.Random(seed)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(number))

    cases = []
    for index in range(count):
        shape = shapes[index % len(shapes)]
        length = rng.randrange(block_tokens + block_tokens // 2, longest_tokens)
        first = tokens(length)
        if shape == "single":
            cases.append(Case(shape, first, first))
        elif shape == "turns":
            cases.append(Case(shape, first, first + tokens(rng.randrange(min(50, block_tokens // 2), block_tokens))))
        elif shape == "extension":
            cases.append(Case(shape, first, first + tokens(block_tokens + rng.randrange(1, 64))))
        else:
            kept = max(block_tokens + 1, 2 * length // 3)
            cases.append(Case(shape, first, first[:kept] + tokens(length - kept + 17)))
    return cases


def compare_case(generate: Generate, case: Case, unrelated: Sequence[int]) -> Comparison:
    """Cold, fill, something unrelated, hit."""
    salt = uuid.uuid4().hex
    cold = generate(case.prompt, salt + "-cold")
    generate(case.fill, salt)
    generate(unrelated, salt + "-unrelated")
    return Comparison(case, cold, generate(case.prompt, salt))


def run_parity(
    completions: Completions, cases: Sequence[Case], unrelated: Sequence[int], done: Callable[[], None] = lambda: None
) -> Parity:
    """Compare hit with cold for every case; `done` is called after each."""
    parity = Parity()
    for case in cases:
        parity.comparisons.append(compare_case(completions.generate, case, unrelated))
        done()
    return parity


def gate(bench: Bench) -> GateResult:
    """The gate: `prompts` cases over the chosen shapes."""
    judge, sizes = Judge(bench), bench.sizes
    shapes = [shape.strip() for shape in sizes.shapes.split(",")]
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        raise ConfigError(f"--shapes {','.join(unknown)}: there are {', '.join(SHAPES)}")
    longest = bench.longest
    cases = make_cases(sizes.prompts, bench.block, longest, sizes.vocab, sizes.seed, shapes)
    unrelated = bench.tokens(bench.random("unrelated"), bench.block + 16)
    for index in bench.cases(len(cases)):
        case = cases[index]
        seen = compare_case(bench.server.generate, case, unrelated)
        judge.compare(index, case.shape, case.prompt, seen.cold, seen.hit)
    judge.figures["longest prompt"] = max(len(case.prompt) for case in cases)
    return judge.result(f"{judge.equal} of {judge.compared} equal, {judge.hits} hit, drift {judge.worst_drift:.3g}")
