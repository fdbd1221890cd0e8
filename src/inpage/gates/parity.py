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

import httpx

from inpage.errors import ServerError

SHAPES = ("single", "turns", "extension", "diverging")


@dataclass(frozen=True)
class Case:
    """What fills the cache, and the prompt that then hits; token ids."""

    shape: str
    fill: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """One answer: tokens, the log probabilities of the top candidates at every position, cached tokens."""

    tokens: tuple[str, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    cached_tokens: int | None

    def same_as(self, other: Generation) -> bool:
        """Equal to the bit: JSON carries floats so that they come back exactly."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs

    def drift(self, other: Generation) -> float:
        """The largest difference of a log probability, over the positions before the tokens part."""
        worst = 0.0
        for mine, theirs, token, other_token in zip(
            self.logprobs, other.logprobs, self.tokens, other.tokens, strict=False
        ):
            both = dict(mine).keys() & dict(theirs).keys()
            worst = max([worst, *(abs(dict(mine)[name] - dict(theirs)[name]) for name in both)])
            if token != other_token:
                break
        return worst


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


def make_cases(count: int, block_tokens: int, longest_tokens: int, vocab: int, seed: int = 0) -> list[Case]:
    """`count` cases over the four shapes, from a little over one block to `longest_tokens`."""
    rng = random.Random(seed)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(number))

    cases = []
    for index in range(count):
        shape = SHAPES[index % len(SHAPES)]
        length = rng.randrange(block_tokens + block_tokens // 2, longest_tokens)
        first = tokens(length)
        if shape == "single":
            cases.append(Case(shape, first, first))
        elif shape == "turns":
            cases.append(Case(shape, first, first + tokens(rng.randrange(50, block_tokens))))
        elif shape == "extension":
            cases.append(Case(shape, first, first + tokens(block_tokens + rng.randrange(1, 64))))
        else:
            kept = max(block_tokens + 1, 2 * length // 3)
            cases.append(Case(shape, first, first[:kept] + tokens(length - kept + 17)))
    return cases


class Completions:
    """vLLM's `/v1/completions` with token ids in, tokens and logprobs out."""

    def __init__(self, base_url: str, model: str, output_tokens: int, timeout_s: float = 300.0) -> None:
        self._client = httpx.Client(base_url=base_url, timeout=timeout_s)
        self._model = model
        self._output_tokens = output_tokens

    def generate(self, prompt: Sequence[int], salt: str) -> Generation:
        """Greedy decoding under a cache salt; raises `ServerError` when the server refuses."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": self._output_tokens,
            "temperature": 0,
            "logprobs": 3,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_tokens_as_token_ids": True,
        }
        try:
            response = self._client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"no answer to a prompt of {len(prompt)} tokens: {error!r}") from error
        if response.status_code != 200:
            raise ServerError(f"HTTP {response.status_code} to a prompt of {len(prompt)} tokens: {response.text[:300]}")
        answer = response.json()
        choice = answer["choices"][0]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Generation(
            tokens=tuple(choice["logprobs"]["tokens"]),
            logprobs=tuple(tuple(sorted(top.items())) for top in choice["logprobs"]["top_logprobs"]),
            cached_tokens=details.get("cached_tokens"),
        )


def run_parity(
    completions: Completions, cases: Sequence[Case], unrelated: Sequence[int], done: Callable[[], None] = lambda: None
) -> Parity:
    """Compare hit with cold for every case; `done` is called after each."""
    parity = Parity()
    for case in cases:
        salt = uuid.uuid4().hex
        cold = completions.generate(case.prompt, salt + "-cold")
        completions.generate(case.fill, salt)
        completions.generate(unrelated, salt + "-unrelated")
        hit = completions.generate(case.prompt, salt)
        parity.comparisons.append(Comparison(case, cold, hit))
        done()
    return parity
