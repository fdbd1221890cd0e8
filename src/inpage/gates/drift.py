"""Logprob drift: hits of one prompt must agree with cold and with each other, whatever ran in between.

A hit that resumes from somebody else's state often still picks the same tokens; the logprobs give it away, and two
hits of one prompt disagree because the state depends on who ran before. So each prompt is answered five times, longer
than in the parity gate: cold, cold again (the control), filled, hit at once, and hit after unrelated prompts, one of
many blocks and one of a few tokens, have taken slots and pages.
"""

from __future__ import annotations

from inpage.gates.bench import Bench, Judge
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt


def gate(bench: Bench) -> GateResult:
    """The gate: `drift_prompts` prompts, `drift_output` tokens each."""
    judge, sizes = Judge(bench), bench.sizes
    control = between = 0.0
    for index in bench.cases(sizes.drift_prompts):
        rng = bench.random(index)
        prompt = bench.tokens(rng, rng.randrange(bench.block + bench.block // 2, bench.longest))
        cold, again = (bench.cold(prompt, sizes.drift_output) for _ in range(2))
        control = max(control, again.drift(cold))
        if not again.same_as(cold):
            judge.unsteady.append(f"case {index}: two cold runs differ by {again.drift(cold):.3g}")
            continue
        salt = fresh_salt()
        bench.server.generate(prompt, salt, sizes.drift_output)
        at_once = bench.server.generate(prompt, salt, sizes.drift_output)
        bench.unrelated(rng, bench.longest)
        bench.unrelated(rng, 3)
        later = bench.server.generate(prompt, salt, sizes.drift_output)
        judge.compare(index, "hit at once", prompt, cold, at_once)
        judge.compare(index, "hit after unrelated prompts", prompt, cold, later)
        if at_once.cached_tokens and later.cached_tokens:
            between = max(between, later.drift(at_once))
    judge.figures |= {"drift between cold runs": control, "drift between two hits": between}
    return judge.result(
        f"drift hit to cold {judge.worst_drift:.3g}, hit to hit {between:.3g}, cold to cold {control:.3g}; "
        f"{judge.equal} of {judge.compared} equal, {judge.hits} hit"
    )
