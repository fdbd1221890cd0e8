"""Edges: prompts around a boundary or a mark, where an off-by-one would serve a state of the wrong position.

| prompt        | hits at        | because                                                                |
|---------------|----------------|------------------------------------------------------------------------|
| B-1, B        | nothing        | the last token is always computed, so a hit needs a block and one more |
| B+1           | B              | the step after the restore computes a single token                     |
| k*B           | (k-1)*B        | one whole block is computed again and saved again                      |
| k*B+1         | k*B            | as B+1, behind several blocks                                          |

On a server with hits inside a block (`--prefix-match-unit u`) also:

| prompt        | hits at        | because                                                                |
|---------------|----------------|------------------------------------------------------------------------|
| u-1, u        | nothing        | as a block, in small                                                   |
| u+1, B-1      | last mark      | in the first block, which no boundary has ended                        |
| B+u, B+u+1    | B, B+u         | only the last mark of a prompt is kept, and only one that ends before  |
| parts past a mark, and before it | the mark, the boundary | the block is copied; its owner must not notice      |
"""

from __future__ import annotations

from inpage.gates.bench import Bench, Judge, Tokens
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt

ROUNDS = 2


def expected_hit(length: int, block: int, unit: int | None) -> int:
    """Tokens of a prompt that it must find when it is sent again."""
    mark = length // unit * unit if unit else 0
    return mark if 0 < mark < length else (length - 1) // block * block


def gate(bench: Bench) -> GateResult:
    """The gate: every edge up to `longest` in two prompts, then prompts that part inside a block."""
    judge, block, unit = Judge(bench), bench.block, bench.server.about.match_unit
    multiples = [k for k in (1, 2, 3, bench.longest // block - 1) if k * block + 1 <= bench.longest]
    edges = {block - 1, *(k * block + off for k in multiples for off in (0, 1))}
    if unit:
        edges |= {unit - 1, unit, unit + 1, block + unit, block + unit + 1}
    again = sorted(edges) * ROUNDS
    # The shared part of two prompts, and where the second must hit: past a mark, before it, in the first block.
    parting = [(block + unit + 1, block + unit), (block + 1, block), (unit + 1, unit)] if unit else []
    for index in bench.cases(len(again) + len(parting)):
        if index < len(again):
            one_edge(bench, judge, index, again[index], expected_hit(again[index], block, unit))
        else:
            one_parting(bench, judge, index, *parting[index - len(again)])
    judge.figures |= {"edges": len(edges), "prompts that part inside a block": len(parting)}
    marks = f" and marks of {unit}" if unit else ""
    return judge.result(
        f"{judge.equal} of {judge.compared} equal at {len(edges)} lengths around boundaries{marks}, {judge.hits} hit, "
        f"drift {judge.worst_drift:.3g}"
    )


def one_edge(bench: Bench, judge: Judge, index: int, length: int, expected: int) -> None:
    """A prompt of this length, cold and sent again."""
    rng = bench.random(index)
    prompt, salt = bench.tokens(rng, length), fresh_salt()
    bench.server.generate(prompt, salt)
    bench.unrelated(rng)
    compare(bench, judge, index, f"edge {length}", prompt, salt, expected)


def one_parting(bench: Bench, judge: Judge, index: int, shared: int, expected: int) -> None:
    """Two prompts that part after `shared` tokens; then the first again, whose last block has been copied."""
    rng, unit = bench.random(index), bench.server.about.match_unit or 1
    salt, tail = fresh_salt(), max(unit // 2, 1)
    first = bench.tokens(rng, (bench.block if shared > bench.block else 0) + unit + tail)
    second = first[:shared] + bench.tokens(rng, tail)
    bench.server.generate(first, salt)
    bench.unrelated(rng)
    compare(bench, judge, index, f"parted after {shared}", second, salt, expected)
    mark = expected_hit(len(first), bench.block, unit)
    compare(bench, judge, index, f"whose copy parted after {shared}", first, salt, mark)


def compare(bench: Bench, judge: Judge, index: int, what: str, prompt: Tokens, salt: str, expected: int) -> None:
    """Judge a prompt that must hit so many tokens under this salt; fewer count as not reached."""
    cold, hit = bench.cold(prompt), bench.server.generate(prompt, salt)
    length, cached = len(prompt), hit.cached_tokens or 0
    if cached >= length:
        judge.fail(index, f"a prompt of {length} tokens hit {cached}: nothing was computed")
    if cached < expected:
        judge.unreached.append(f"case {index}: a prompt of {length} tokens ({what}) hit {cached}, not {expected}")
    if cached:
        judge.compare(index, what, prompt, cold, hit)
    else:
        judge.expect_equal(index, f"{what}, no hit", prompt, cold, hit)
