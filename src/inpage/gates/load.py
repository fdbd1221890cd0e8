"""Load beside a gate: requests of every kind, some cut off, until it is told to stop."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from random import Random
from threading import Event
from types import TracebackType

from inpage.errors import ServerError
from inpage.gates.bench import Bench
from inpage.gates.server import fresh_salt

STAGES = ("before its first chunk", "in prefill", "in decode")


def cut_off(bench: Bench, rng: Random, prompt: tuple[int, ...], salt: str, stage: str) -> None:
    """Send a prompt and close the connection at a stage of its life; raises `ServerError` when it is refused."""
    with bench.server.completions.stream(prompt, salt, 4 * bench.sizes.output + 16) as events:
        if stage == STAGES[1]:
            time.sleep(rng.uniform(0.0, 0.1))
        elif stage == STAGES[2]:
            list(islice(events, rng.randrange(1, 2 * bench.sizes.output)))


class Load:
    """Runs while a `with` block runs; `answered` and `errors` say what came of it."""

    def __init__(self, bench: Bench, threads: int) -> None:
        self._bench = bench
        self._threads = threads
        self._stop = Event()
        self._pool = ThreadPoolExecutor(threads)
        self._workers: list[Future[None]] = []
        self.answered: Counter[str] = Counter()
        self.errors: list[str] = []

    def __enter__(self) -> Load:
        self._workers = [self._pool.submit(self._work, index) for index in range(self._threads)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)

    def _work(self, index: int) -> None:
        bench, rng = self._bench, self._bench.random(f"load/{index}")
        last: tuple[tuple[int, ...], str] = (bench.tokens(rng, bench.block + 1), fresh_salt())
        while not self._stop.is_set():
            kind = rng.choice(("cold", "again", "grown", "long answer", "short", "cut off"))
            prompt, salt = bench.tokens(rng, rng.randrange(2, 2 * bench.block)), fresh_salt()
            if kind == "again":
                prompt, salt = last
            elif kind == "grown":
                prompt, salt = (last[0] + prompt)[: bench.longest], last[1]
            elif kind == "short":
                prompt = prompt[: rng.randrange(1, 16)]
            try:
                if kind == "cut off":
                    cut_off(bench, rng, prompt, salt, rng.choice(STAGES))
                else:
                    output = 8 * bench.sizes.output if kind == "long answer" else bench.sizes.output
                    bench.server.completions.generate(prompt, salt, output)
            except ServerError as error:
                self.errors.append(f"{kind}: {error}")
                return
            self.answered[kind] += 1
            if kind in ("cold", "grown"):
                last = (prompt, salt)
