"""Edges: prompts around a boundary, where an off-by-one would serve a state of the wrong position.

| prompt        | hits at        | because                                                                |
|---------------|----------------|------------------------------------------------------------------------|
| B-1, B        | nothing        | the last token is always computed, so a hit needs a block and one more |
| B+1           | B              | the step after the restore computes a single token                     |
| k*B           | (k-1)*B        | one whole block is computed again and saved again                      |
| k*B+1         | k*B            | as B+1, behind several blocks                                          |
"""

from __future__ import annotations

from inpage.gates.bench import Bench, Judge
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt

ROUNDS = 2


def gate(bench: Bench) -> GateResult:
    """The gate: every edge up to `longest`, each in two prompts."""
    judge, block = Judge(bench), bench.block
    multiples = [k for k in (1, 2, 3, bench.longest // block - 1) if k * block + 1 <= bench.longest]
    edges = sorted({block - 1, *(k * block + off for k in multiples for off in (0, 1))}) * ROUNDS
    inside = 0
    for index in bench.cases(len(edges)):
        rng, length = bench.random(index), edges[index]
        prompt, salt = bench.tokens(rng, length), fresh_salt()
        cold = bench.cold(prompt)
        bench.server.generate(prompt, salt)
        bench.unrelated(rng)
        hit = bench.server.generate(prompt, salt)
        expected, cached = (length - 1) // block * block, hit.cached_tokens or 0
        if cached >= length:
            judge.fail(index, f"a prompt of {length} tokens hit {cached}: nothing was computed")
        inside += cached > expected
        if cached < expected:
            judge.unreached.append(f"case {index}: a prompt of {length} tokens hit {cached}, not {expected}")
        if cached:
            judge.compare(index, f"edge {length}", prompt, cold, hit)
        else:
            judge.expect_equal(index, f"edge {length}, no hit", prompt, cold, hit)
    judge.figures |= {"edges": len(set(edges)), "longer than whole blocks": inside}
    return judge.result(
        f"{judge.equal} of {judge.compared} equal at {len(set(edges))} lengths around boundaries, {judge.hits} hit, "
        f"drift {judge.worst_drift:.3g}"
    )
