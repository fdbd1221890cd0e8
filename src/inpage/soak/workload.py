"""What a soak sends: a seeded stream of requests, and the canaries whose answers are known. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCAB = 250
"""Token ids below this are plain bytes of the demo's tokenizer."""
STAGES = ("sent", "waiting", "answering")
"""When a client hangs up: right after sending, after a while without an answer, after some tokens."""
ABORT_SHARE = 0.15
PREFIXES = 5
SALTS = 3
CROWD = 12
"""The first requests: as many as the soaked server runs at once, each decoding across a boundary, none leaving. However
fast the machine, they need more blocks together than the pool has, so a soak of any length preempts."""


@dataclass(frozen=True)
class Planned:
    """One request; with `hang_up` the client leaves at that stage, `patience_s` or `patience_tokens` into it."""

    number: int
    prompt: tuple[int, ...]
    salt: str
    output_tokens: int
    hang_up: str | None = None
    patience_s: float = 0.0
    patience_tokens: int = 0


def requests(count: int, block_tokens: int, seed: int) -> Iterator[Planned]:
    """`count` requests: a crowd, then prompts of one token, below a block, at block edges, of some blocks, with shared
    prefixes."""
    rng = random.Random(seed)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(number))

    prefixes = [tokens(rng.randrange(block_tokens, 2 * block_tokens + 9)) for _ in range(PREFIXES)]
    for number in range(min(count, CROWD)):
        yield Planned(number, tokens(2 * block_tokens - 4), f"{seed}-crowd", output_tokens=block_tokens + 8)
    for number in range(CROWD, count):
        shape = rng.random()
        if shape < 0.10:
            prompt = tokens(1)
        elif shape < 0.25:
            prompt = tokens(rng.randrange(2, block_tokens))
        elif shape < 0.35:
            prompt = tokens(rng.randrange(1, 4) * block_tokens + rng.choice((-1, 0, 1)))
        elif shape < 0.40:
            prompt = tokens(rng.randrange(block_tokens, 5 * block_tokens))
        else:
            # Under several salts: what one salt has filled must not be found under another.
            prompt = rng.choice(prefixes) + tokens(rng.randrange(1, block_tokens // 2))
        # One answer in twenty is long enough to cross a boundary while it decodes.
        output = block_tokens + 8 if rng.random() < 0.05 else rng.randrange(1, 9)
        hang_up = rng.choice(STAGES) if rng.random() < ABORT_SHARE else None
        yield Planned(
            number,
            prompt,
            salt=f"{seed}-{rng.randrange(SALTS)}",
            # More than any machine answers before the client's patience ends.
            output_tokens=8 * block_tokens if hang_up else output,
            hang_up=hang_up,
            patience_s={"sent": rng.uniform(0.002, 0.02), "waiting": rng.uniform(0.02, 0.6)}.get(hang_up or "", 0.0),
            patience_tokens=rng.randrange(1, 6) if hang_up == "answering" else 0,
        )


@dataclass(frozen=True)
class Canary:
    """A prompt that is asked alone; one of more than a block must hit when it is asked again."""

    name: str
    prompt: tuple[int, ...]
    hits: bool


def canaries(block_tokens: int, seed: int) -> list[Canary]:
    """Prompts of one token, below a block, at and behind boundaries, and of several blocks."""
    rng = random.Random(seed + 1)
    lengths = (1, block_tokens // 2, block_tokens, block_tokens + 1, 2 * block_tokens + 9, 5 * block_tokens + 17)
    return [
        Canary(f"{length} tokens", tuple(rng.randrange(VOCAB) for _ in range(length)), length > block_tokens)
        for length in lengths
    ]
