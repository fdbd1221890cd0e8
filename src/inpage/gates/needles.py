"""Needles: a fact hidden at a depth of a long text must be found by a hit wherever the cold run finds it.

The only gate that needs a model that can read. Where the cold run does not find the needle there is nothing to judge;
where it does, the hit must find it too, with the same words.
"""

from __future__ import annotations

from random import Random

from inpage.errors import ConfigError
from inpage.gates.bench import Bench, Judge
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt

PLACES = ("harbour", "mill", "orchard", "lighthouse", "quarry", "chapel", "market", "bridge")
WEATHER = ("The morning was calm.", "Rain fell in the afternoon.", "A cart passed by.", "Nobody said a word.")
ANSWER_TOKENS = 12


def depths_of(text: str) -> list[float]:
    """The depths as numbers from 0 to 1; `ConfigError` for anything else."""
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = []
    if not depths or not all(0.0 <= depth <= 1.0 for depth in depths):
        raise ConfigError(f"--depths {text} is not a list of numbers from 0 to 1, like 0.1,0.5,0.9")
    return depths


def haystack(rng: Random, characters: int, depth: float, needle: str) -> str:
    """A text of about so many characters with the needle at a depth of it."""
    sentences: list[str] = []
    length = 0
    while length < characters:
        sentences.append(f"Day {len(sentences) + 1}. {rng.choice(WEATHER)}")
        length += len(sentences[-1]) + 1
    sentences.insert(int(depth * len(sentences)), needle)
    return " ".join(sentences)


def gate(bench: Bench) -> GateResult:
    """The gate: one text of `needle_tokens` tokens for each depth."""
    judge, client = Judge(bench), bench.server.completions
    depths = depths_of(bench.sizes.depths)
    sample = haystack(bench.random("sample"), 600, 0.5, "")
    _, sample_tokens, _ = client.text(sample, fresh_salt(), 1)
    room = (bench.server.about.max_model_len or 2**30) - 200
    tokens = min(bench.sizes.needle_tokens or 8 * bench.block, room)
    found = found_by_hit = longest = 0
    for index in bench.cases(len(depths)):
        rng, salt = bench.random(index), fresh_salt()
        place, code = rng.choice(PLACES), str(rng.randrange(10_000, 100_000))
        text = haystack(
            rng, tokens * len(sample) // sample_tokens * 95 // 100, depths[index], f"The code of the {place} is {code}."
        )
        prompt = f"{text}\n\nQuestion: what is the code of the {place}?\nAnswer: The code of the {place} is"
        cold, length, _ = client.text(prompt, fresh_salt(), ANSWER_TOKENS)
        longest = max(longest, length)
        client.text(text, salt, 1)
        bench.unrelated(rng)
        before = bench.server.metrics()
        hit, _, cached = client.text(prompt, salt, ANSWER_TOKENS)
        cached = cached or bench.server.grown(before, length)
        if code not in cold:
            judge.unreached.append(f"case {index}: the cold run does not find the needle at depth {depths[index]}")
            continue
        found += 1
        if not cached:
            judge.unreached.append(f"case {index}: the prompt of {length} tokens did not hit")
            continue
        found_by_hit += code in hit
        if code not in hit or hit != cold:
            judge.fail(
                index, f"depth {depths[index]}, {length} tokens, {cached} cached: cold says {cold!r}, hit says {hit!r}"
            )
    judge.figures |= {
        "needles": len(depths),
        "found cold": found,
        "found by a hit": found_by_hit,
        "longest text": longest,
    }
    return judge.result(f"{found} of {len(depths)} found cold, {found_by_hit} by a hit, texts of {longest:,} tokens")
