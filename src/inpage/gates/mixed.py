"""Mixed load: hits while the server is busy with everything at once, and after it.

A batch of another shape may take other kernels, whose last bits differ with nothing wrong. So the load comes with a
control: cold runs of the same prompts under the same load. Only where all of them equal the cold runs that were
alone is a hit under load judged, to the bit; where they do not, the gate says so and is not judged. The hits after
the load are alone again and are judged on every server: bytes that the load has damaged show there.
"""

from __future__ import annotations

import time

from inpage.gates.bench import Bench, Judge
from inpage.gates.client import Generation
from inpage.gates.load import Load
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt

CHECKED = 3


def gate(bench: Bench) -> GateResult:
    """The gate: `load_threads` clients for `load_seconds`."""
    judge, sizes, server = Judge(bench, by_case=False), bench.sizes, bench.server
    rng = bench.random("checked")
    prompts = [bench.tokens(rng, bench.block + rng.randrange(2, bench.block)) for _ in range(CHECKED)]
    salts = [fresh_salt() for _ in prompts]
    references = [bench.cold(prompt) for prompt in prompts]
    for prompt, salt in zip(prompts, salts, strict=True):
        server.generate(prompt, salt)
    counts = server.about.cached_counts_from == "usage"
    controls: list[tuple[int, Generation]] = []
    hits: list[tuple[int, Generation]] = []
    bench.expect(int(sizes.load_seconds))
    with Load(bench, sizes.load_threads) as load:
        began = time.monotonic()
        ticks = 0
        while time.monotonic() - began < sizes.load_seconds and not load.errors:
            for index, prompt in enumerate(prompts):
                controls.append((index, server.completions.generate(prompt, fresh_salt())))
                hits.append((index, server.completions.generate(prompt, salts[index])))
            while ticks < min(int(time.monotonic() - began), int(sizes.load_seconds)):
                ticks += 1
                bench.advance()
    for error in load.errors:
        judge.fail(None, f"under load, {error}")
    if not server.drained(nudge=True):
        judge.fail(None, f"{server.in_flight()} requests still run or wait a minute after the load ended")

    noise = max((control.drift(references[index]) for index, control in controls), default=0.0)
    steady = all(control.same_as(references[index]) for index, control in controls)
    under_load = sum(bool(hit.cached_tokens) for _, hit in hits)
    worst = max((hit.drift(references[index]) for index, hit in hits), default=0.0)
    if steady:
        for index, hit in hits:
            judge.expect_equal(index, "hit under load", prompts[index], references[index], hit)
    else:
        judge.unreached.append(
            f"cold runs under load differ from cold runs alone by up to {noise:.3g}: kernels of this server depend on "
            f"the batch, so hits under load (off by up to {worst:.3g}) have nothing exact to be equal to"
        )
    if counts and not under_load:
        judge.unreached.append("no checked prompt hit under load: the load evicts them, the pool is too small")

    for index, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
        server.generate(prompt, salt)  # the load may have evicted it
        judge.compare(index, "hit after the load", prompt, references[index], server.generate(prompt, salt))
    judge.figures |= {
        "requests of the load": load.answered.total(),
        "of them cut off": load.answered["cut off"],
        "checked under load": len(hits),
        "hits under load": under_load,
        "drift of cold runs under load": noise,
        "drift of hits under load": worst,
    }
    return judge.result(
        f"{load.answered.total()} requests of load beside {len(hits)} checked ({under_load} hit); "
        f"{judge.equal} of {judge.compared} equal; cold under load drifts {noise:.3g}, hits {worst:.3g}"
    )
