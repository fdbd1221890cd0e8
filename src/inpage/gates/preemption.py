"""Preemption mid-decode: a request that lost its slot and blocks and came back must go on as if it had just been asked.

The server must be made to preempt. It admits a request when its whole prompt fits the blocks that are free then, so:
long prompts ("pressure") fill the pool one after the other; the last one is cut to what is free, measured by the
server's own gauge; and while it still grows, short requests whose first block is cached ("victims") join, start from
a hit and decode. The last prompt then needs their blocks, vLLM preempts the youngest, and the victims come back when
the pressure is cut off.

A preempted request computes what it had generated again, as a prompt, and goes on; prefill rounds differently from
decode, so its logprobs are those of no single run. But they are exactly those of two (or more) runs put together:

    output 0 … j-1   the victim's prompt, alone and cold
    output j … n     the victim's prompt and its own tokens 0 … j-1, alone and cold

for the position j at which it came back. The gate looks for such positions; an output that no j explains, to the bit,
was computed from a wrong state. A control comes first: an answer beside a long prefill must equal the answer alone.
Where it does not, kernels depend on the batch, and the gate is not judged.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from threading import Event
from types import TracebackType

from inpage.gates.bench import Bench, Judge, Tokens
from inpage.gates.client import Generation
from inpage.gates.result import GateResult
from inpage.gates.server import fresh_salt

PREEMPTIONS = "vllm:num_preemptions_total"
USAGE = "vllm:kv_cache_usage_perc"
VICTIMS = 2
MOST_PRESSURE = 8
LOOK_BACK = 8
"""A resume may show this many tokens late, where prefill and decode happen to agree."""
PATIENCE_S = 900.0
ARRIVAL_S = 2.0


def gate(bench: Bench) -> GateResult:
    """The gate: `preempt_rounds` rounds of two victims."""
    judge, server = Judge(bench), bench.server
    pool = bench.sizes.pool_blocks or server.about.pool_blocks
    metrics = server.metrics()
    preempted = metrics.total(PREEMPTIONS)
    if pool is None or preempted is None or metrics.total(USAGE) is None:
        judge.unreached.append(
            "the pool's size is not in /metrics (num_gpu_blocks of vllm:cache_config_info): give --pool-blocks"
            if pool is None
            else f"the server's /metrics have no {PREEMPTIONS} or no {USAGE}"
        )
        return judge.result("could not be set up")
    if (pool - 1) // room_blocks(bench) > MOST_PRESSURE:
        judge.unreached.append(
            f"{MOST_PRESSURE} prompts of max-model-len do not fill the pool of {pool:,} blocks: start the server with "
            "a smaller one (--num-gpu-blocks-override)"
        )
        return judge.result("no preemption was forced")
    if (noise := batch_noise(bench)) is not None:
        judge.unreached.append(
            f"an answer beside a long prefill differs from the answer alone by {noise:.3g}: kernels of this server "
            "depend on the batch, so a request that ran beside others has nothing exact to be equal to"
        )
        return judge.result("could not be judged")

    resumes = 0
    for index in bench.cases(bench.sizes.preempt_rounds):
        for prompt, salt, answer in one_round(bench, index, pool):
            found = explain(bench, prompt, answer)
            judge.compared += 1
            if found is None:
                judge.fail(
                    index,
                    f"the {len(answer.tokens)} tokens after a prompt of {len(prompt)} are those of no run from a right "
                    "state, with no, one or more resumes in between",
                )
                continue
            judge.equal += 1
            resumes += len(found)
            tail = prompt[: bench.block] + bench.tokens(bench.random(f"{index}/tail"), 20)
            left = server.generate(tail, salt)
            if left.cached_tokens:
                judge.compare(index, "what a preempted request left in the cache", tail, bench.cold(tail), left)
    forced = int((server.metrics().total(PREEMPTIONS) or 0) - preempted)
    if not forced:
        judge.unreached.append(
            f"no preemption was forced in a pool of {pool:,} blocks of {bench.block}: a smaller pool "
            "(--num-gpu-blocks-override) or more sequences (--max-num-seqs) may do it"
        )
    elif not resumes:
        judge.unreached.append(f"{forced} preemptions, but none of a request whose answer is checked")
    judge.figures |= {"preemptions": forced, "resumes seen mid-decode": resumes}
    return judge.result(
        f"{forced} preemptions, {resumes} resumes inside checked answers; {judge.equal} of {judge.compared} equal to "
        "runs alone"
    )


def room_blocks(bench: Bench) -> int:
    """Blocks of the longest prompt that leaves room to answer."""
    return (bench.server.about.max_model_len or 2**30) // bench.block - 1


def batch_noise(bench: Bench) -> float | None:
    """Drift between an answer alone and beside a long prefill, nothing cached; None when they are equal."""
    rng = bench.random("control")
    prompt = bench.tokens(rng, bench.block + 20)
    alone = bench.cold(prompt, 32)
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(bench.server.completions.generate, bench.tokens(rng, bench.longest), fresh_salt(), 32)]
        beside.append(pool.submit(bench.server.completions.generate, prompt, fresh_salt(), 32))
        answers = [future.result() for future in beside]
    return None if answers[1].same_as(alone) else answers[1].drift(alone)


class Pressure:
    """Long prompts that hold their blocks until the `with` block ends; `grow` adds one."""

    def __init__(self, bench: Bench, rng: Random) -> None:
        self._bench, self._rng = bench, rng
        self._end = Event()
        self._pool = ThreadPoolExecutor(MOST_PRESSURE + 1)
        self._workers: list[Future[None]] = []

    def __enter__(self) -> Pressure:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._pool.shutdown(wait=True)
        for worker in self._workers:
            if error is None:
                worker.result()

    def grow(self, blocks: int) -> Event:
        """Send a prompt that fills so many blocks; the event is set when its prefill has ended."""
        prompt = self._bench.tokens(self._rng, blocks * self._bench.block - 7)
        ready = Event()
        self._workers.append(self._pool.submit(self._hold, prompt, ready))
        return ready

    def arrive(self) -> None:
        """Wait until the server counts every prompt that was sent; not for long, as one may have ended."""
        deadline = time.monotonic() + ARRIVAL_S
        time.sleep(0.1)  # the gauges may still have a request that has just been answered
        while self._bench.server.in_flight() < len(self._workers) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _hold(self, prompt: Tokens, ready: Event) -> None:
        room = (self._bench.server.about.max_model_len or 2**30) - len(prompt)
        completions = self._bench.server.completions
        try:
            with completions.stream(prompt, fresh_salt(), min(room, 4 * self._bench.block)) as events:
                for _ in events:
                    ready.set()
                    if self._end.is_set():
                        return
        finally:
            ready.set()


def one_round(bench: Bench, index: int, pool: int) -> list[tuple[Tokens, str, Generation]]:
    """Build pressure, fill the victims' first blocks, let them join the last pressure prompt; their answers."""
    rng, server = bench.random(index), bench.server
    rest = max(2, min(40, bench.block // 4))
    victims = [(bench.tokens(rng, bench.block + rng.randrange(1, rest)), fresh_salt()) for _ in range(VICTIMS)]
    output = min(200, bench.block - rest - 2)  # no boundary inside: a checkpoint written by a decode has other bits
    usable, room = pool - 1, room_blocks(bench)
    with ThreadPoolExecutor(VICTIMS) as clients:
        with Pressure(bench, rng) as pressure:
            used = overhead = 0
            # A first prompt is needed to see what a request takes beside its attention blocks.
            while not used or usable - used - overhead > room:
                blocks = min(room, 2 * usable // 3)
                pressure.grow(blocks).wait(PATIENCE_S)
                now = round((server.metrics().total(USAGE) or 0.0) * usable)
                overhead = max(now - used - blocks, 0)
                if now <= used:  # not admitted
                    break
                used = now
            for prompt, salt in victims:
                server.generate(prompt[: bench.block + 1], salt, 1)
            last = pressure.grow(max(usable - used - overhead - 1, 1))
            pressure.arrive()  # before the victims, so that they are the youngest
            answers = [clients.submit(server.completions.generate, prompt, salt, output) for prompt, salt in victims]
            deadline = time.monotonic() + PATIENCE_S
            while not (last.is_set() or all(answer.done() for answer in answers)) and time.monotonic() < deadline:
                time.sleep(0.05)
        return [(prompt, salt, answer.result()) for (prompt, salt), answer in zip(victims, answers, strict=True)]


def explain(bench: Bench, prompt: Tokens, answer: Generation) -> list[int] | None:
    """The positions at which an answer was resumed, none if it ran through; None when nothing explains it."""
    if not answer.finite:
        return None
    ids, length = answer.token_ids, len(answer.tokens)
    resumed: list[int] = []
    start = 0
    run = bench.cold(prompt, length)
    while (parted := first_difference(answer, run, start)) < length:
        for at in range(parted, max(start, parted - LOOK_BACK), -1):
            run = bench.cold((*prompt, *ids[:at]), length - at)
            if first_difference(answer, run, at) > parted:
                resumed.append(at)
                start = at
                break
        else:
            return None
    return resumed


def first_difference(answer: Generation, run: Generation, start: int) -> int:
    """The first output position from `start` on where the answer is not what `run`, which begins there, has."""
    for offset, (token, top) in enumerate(zip(run.tokens, run.logprobs, strict=True)):
        at = start + offset
        if (answer.tokens[at], answer.logprobs[at]) != (token, top):
            return at
    return len(answer.tokens)
