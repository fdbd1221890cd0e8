"""Isolation: nothing of one tenant's prompt reaches another tenant's answer.

Every round has a victim and another tenant, each with a cache salt of its own. The victim's prompt is answered cold
before the secret exists; an answer that stays equal to that one, to the bit, cannot contain anything of the secret.

1. victim: cold, then a fill under its salt
2. other tenant: the victim's own prompt under the other salt, which must not hit
3. other tenant: the secret, planted over and over in a prompt as long as the victim's, so that it uses the same
   slot, the same shapes and pages that the victim's blocks may get next
4. victim: a hit, which must equal the first answer; and a cold run, which must too
"""

from __future__ import annotations

from inpage.gates.bench import Bench, Judge
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt

SECRET_TOKENS = 8


def gate(bench: Bench) -> GateResult:
    """The gate: `rounds` rounds."""
    judge = Judge(bench)
    crossed = leaks = 0
    for index in bench.cases(bench.sizes.rounds):
        rng = bench.random(index)
        prompt = bench.tokens(rng, rng.randrange(bench.block + bench.block // 2, min(3 * bench.block, bench.longest)))
        secret = bench.tokens(rng, SECRET_TOKENS)
        mine, theirs = fresh_salt(), fresh_salt()
        before = bench.cold(prompt)
        bench.server.generate(prompt, mine)
        stolen = bench.server.generate(prompt, theirs)
        if stolen.cached_tokens:
            crossed += 1
            judge.fail(index, f"another cache salt hit {stolen.cached_tokens} tokens of the victim's prompt")
        bench.server.generate((secret * len(prompt))[: len(prompt)], theirs)
        hit = bench.server.generate(prompt, mine)
        cold_after = bench.cold(prompt)
        equal = [
            judge.expect_equal(index, "the victim's prompt under another salt", prompt, before, stolen),
            judge.compare(index, "hit after a secret was planted", prompt, before, hit, excusable=False),
            judge.expect_equal(index, "cold run after a secret was planted", prompt, before, cold_after),
        ]
        leaks += not all(equal)
    judge.figures |= {"rounds that differ": leaks, "hits across salts": crossed}
    return judge.result(
        f"{leaks} rounds in which a secret changed an answer, {crossed} hits across salts; {judge.hits} hit"
    )
