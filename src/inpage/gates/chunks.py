"""Cold runs of one prompt whose prefill chunks end elsewhere: what a hit is looked for in when it differs from cold.

A hit may be cut into other chunks than its cold run, when the token budget holds several blocks. Kernels that round
by the shape of a chunk then give it other last bits, and no state is wrong. Whether that is so is not a matter of how
*much* it differs: a wrong state may differ by less than two cold runs do. It is so only when a cold run gives the very
answer of the hit, every token and every logprob. Cold runs with other chunks can be had over HTTP in two ways:

- **A junction.** A prompt that shares the first j blocks, under the same fresh salt, and whose first chunk ended
  behind them: there is K and V to find, but no checkpoint. The prompt starts from nothing (its answer must say that
  nothing was cached), and vLLM ends a chunk after j blocks, where it has seen two prompts part.
- **Company.** Others are ahead in the queue and leave less of the budget for the first chunk.

Neither can be had where a chunk holds one block: there a hit that differs is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from inpage.gates.client import Generation
from inpage.gates.server import fresh_salt

if TYPE_CHECKING:
    from inpage.gates.bench import Bench

MOST_JUNCTIONS = 4
COMPANY = (1, 2, 3)
"""Requests ahead in the queue, one of them long."""
WHAT_TO_CHANGE = (
    "for hits equal to the bit let a chunk hold one block (--max-num-batched-tokens of one block and the decodes, "
    "below two) and use one thread"
)


def explained_by_a_cold_run(bench: Bench, prompt: Sequence[int], other: Generation) -> tuple[bool, int]:
    """Whether some cold run with other chunks equals `other` to the bit, and how many were looked at."""
    looked = 0
    for run in cold_runs(bench, tuple(prompt), len(other.tokens)):
        if run.cached_tokens != 0:  # not cold, or nobody knows
            continue
        looked += 1
        if run.same_as(other):
            return True, looked
    return False, looked


def cold_runs(bench: Bench, prompt: tuple[int, ...], outputs: int) -> Iterator[Generation]:
    """Runs of the prompt that should be cold with other chunk ends; their cached tokens say whether they were cold."""
    server, block = bench.server, bench.block
    rng = bench.random(f"chunks of {len(prompt)}")
    for blocks in range(1, min(MOST_JUNCTIONS, (len(prompt) - 1) // block) + 1):
        salt = fresh_salt()
        room = max(bench.longest - blocks * block, block)
        server.generate(prompt[: blocks * block] + bench.tokens(rng, room), salt, 1)
        yield server.generate(prompt, salt, outputs)
    if server.about.cached_counts_from != "usage":
        return
    for many in COMPANY:
        others = [bench.tokens(rng, bench.longest)] + [bench.tokens(rng, block - 1) for _ in range(many - 1)]
        with ThreadPoolExecutor(len(others)) as pool:
            waiting = []
            for one in others:
                waiting.append(pool.submit(server.completions.generate, one, fresh_salt(), 1))
                time.sleep(0.01)
            run = server.completions.generate(prompt, fresh_salt(), outputs)
            for answer in waiting:
                answer.result()
        yield replace(run, cached_tokens=run.cached_tokens or 0)
