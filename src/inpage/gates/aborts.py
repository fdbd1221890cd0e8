"""Abort storm: requests cut off before, in and after prefill must leave slots, pages and published blocks in order.

What is compared is compared one request at a time, after the storm:

- prompts that were cached before the storm still hit, equal to cold
- prompts that were cut off are sent again under their salt: whatever of them was published must equal cold
- as many requests as the storm had at once are answered: no slot and no block has been lost
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from inpage.errors import ServerError
from inpage.gates.bench import Bench, Judge, Tokens
from inpage.gates.load import STAGES, cut_off
from inpage.gates.result import GateResult
from inpage.gates.server import Server, fresh_salt

AT_ONCE = 8
CHECKED = 4
FINISHED = "vllm:request_success_total"
"""Requests that ended by themselves; vLLM counts one that its client gave up nowhere."""


def gate(bench: Bench) -> GateResult:
    """The gate: `aborts` requests cut off, eight at a time."""
    judge, server = Judge(bench, by_case=False), bench.server
    bench.expect(bench.sizes.aborts)
    rng = bench.random("kept")
    kept = [(bench.tokens(rng, bench.block + rng.randrange(2, bench.block)), fresh_salt()) for _ in range(CHECKED)]
    finished, answered = server.metrics().total(FINISHED), server.completions.answered

    def cut(index: int) -> tuple[Tokens, str, str | None]:
        rng = bench.random(index)
        prompt, salt = bench.tokens(rng, rng.randrange(2, bench.longest)), fresh_salt()
        try:
            cut_off(bench, rng, prompt, salt, STAGES[index % len(STAGES)])
            return prompt, salt, None
        except ServerError as error:
            return prompt, salt, str(error)
        finally:
            bench.advance()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        first = list(pool.map(cut, range(bench.sizes.aborts // 2)))
    references = [bench.cold(prompt) for prompt, _ in kept]
    for prompt, salt in kept:
        server.generate(prompt, salt)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        storm = first + list(pool.map(cut, range(len(first), bench.sizes.aborts)))
    errors = [error for _, _, error in storm if error]
    for error in errors:
        judge.fail(None, f"in the storm: {error}")
    if not server.drained(nudge=True):
        judge.fail(None, f"{server.in_flight()} requests still run or wait a minute after all were cut off")

    missed = 0
    for index, ((prompt, salt), reference) in enumerate(zip(kept, references, strict=True)):
        hit = server.generate(prompt, salt)
        missed += not hit.cached_tokens
        if hit.cached_tokens:
            judge.compare(index, "cached before the storm", prompt, reference, hit)
    for index, (prompt, salt, _) in enumerate(storm[-3 * CHECKED :]):
        again = server.generate(prompt, salt)
        missed += not again.cached_tokens
        judge.expect_equal(index, "cut off, sent again", prompt, bench.cold(prompt), again)
        judge.hits += bool(again.cached_tokens)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda prompt: server.completions.generate(prompt, fresh_salt()), [p for p, _ in kept] * 4))

    aborted = None if finished is None else len(storm) - ended_by_themselves(server, finished, answered)
    if not aborted:
        judge.unreached.append(
            f"the server does not count finished requests ({FINISHED} in /metrics)"
            if aborted is None
            else f"{len(storm)} requests were cut off, but the server finished every one before it noticed"
        )
    if not judge.hits:
        judge.unreached.append("nothing that was cached before or in the storm hit after it: the pool is too small")
    judge.figures |= {"cut off": len(storm), "aborted": aborted or 0, "not cached any more": missed}
    return judge.result(
        f"{len(storm)} cut off, {aborted or 0} aborted; afterwards {judge.equal} of {judge.compared} equal, "
        f"{judge.hits} hit"
    )


def ended_by_themselves(server: Server, finished: float, answered: int) -> int:
    """Requests of the storm that the server finished all the same, from its count and ours before the storm."""
    deadline = time.monotonic() + 2.0
    while True:
        ours = server.completions.answered - answered
        theirs = int((server.metrics().total(FINISHED) or 0.0) - finished)
        if theirs >= ours or time.monotonic() > deadline:  # counters follow the answer
            return max(theirs - ours, 0)
        time.sleep(0.05)
