"""A soak against a running server: stretches of load, and between them pauses in which everything must be home."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import httpx

from inpage.demo.server import RunningServer
from inpage.gates.client import Completions, Generation
from inpage.gates.metrics_text import Metrics
from inpage.soak.load import Load
from inpage.soak.memory import resident_bytes
from inpage.soak.result import MemorySample, Pause, SoakResult
from inpage.soak.workload import Canary, canaries, requests

CANARY_OUTPUT_TOKENS = 8
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting", "inpage_slots_in_use")
DEAD = ("EngineDeadError", "StateError", "EngineCore encountered a fatal error")
DRAIN_S = 30.0
SETTLE_S = 0.3
"""For the step in which the worker hears of the last finished requests, and its numbers' way to /metrics."""
SAMPLE_S = 1.0


class Soak:
    """One soak; `result` grows while it runs."""

    def __init__(
        self,
        server: RunningServer,
        model: str,
        block_tokens: int,
        result: SoakResult,
        pauses: int,
        resets_every: int,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._server = server
        self._block_tokens = block_tokens
        self._result = result
        self._pauses = pauses
        self._resets_every = resets_every
        self._done = done
        self._ended = 0
        self._completions = Completions(server.url, model, CANARY_OUTPUT_TOKENS)
        self._load = Load(server.url, model, result.concurrency, self._one_ended)
        self._canaries = canaries(block_tokens, result.seed)

    def _one_ended(self) -> None:
        self._ended += 1
        self._done()

    def run(self) -> SoakResult:
        """All stretches and pauses; `ServerError` or `httpx.HTTPError` when the server no longer answers a canary."""
        result = self._result
        recorded = [self._ask(canary, "recorded") for canary in self._canaries]
        self._drained()
        before = self._metrics()
        began = time.monotonic()
        stream = requests(result.requests, self._block_tokens, result.seed)
        with self._watching_memory():
            for index in range(self._pauses):
                # The numbers are cut so that all stretches together are the whole.
                count = (index + 1) * result.requests // self._pauses - index * result.requests // self._pauses
                resetting = bool(index % 2)
                preempted = self._metrics().total(PREEMPTIONS) or 0.0
                tally = self._load.run(islice(stream, count), self._resets_every if resetting else None)
                if not resetting:
                    result.preemptions_by_pool += (self._metrics().total(PREEMPTIONS) or 0.0) - preempted
                result.finished += tally.finished
                result.tokens += tally.tokens
                for stage, aborted in tally.aborted.items():
                    result.aborted[stage] = result.aborted.get(stage, 0) + aborted
                result.errors += tally.errors
                result.resets_while_running += tally.resets
                result.pauses.append(self._pause(recorded, reset=bool(index % 3)))
                if tally.errors:
                    break
        result.wall_s = time.monotonic() - began
        self._drained()
        after = self._metrics()
        for name in [*after.names("inpage_"), *after.names("vllm:num_preemptions"), *after.names("vllm:prefix_cache")]:
            if name.endswith("_total"):
                result.metrics[name] = (after.total(name) or 0.0) - (before.total(name) or 0.0)
        result.errors += [line for text in DEAD for line in self._server.lines(text)][:10]
        return result

    # ------------------------------------------------------------------ pauses
    def _pause(self, recorded: list[Generation], reset: bool) -> Pause:
        pause = Pause(requests=self._ended, slots_in_use=self._drained())
        if reset:
            response = self._completions.http.post("/reset_prefix_cache")
            pause.reset = response.status_code == 200 and bool(response.json().get("success"))
        salt = f"pause-{self._ended}"
        for again in (False, True):
            for canary, known in zip(self._canaries, recorded, strict=True):
                answer = self._ask(canary, salt)
                pause.asked += 1
                pause.hits += bool(answer.cached_tokens)
                if again and canary.hits and not answer.cached_tokens:
                    pause.missed.append(canary.name)
                if not answer.same_as(known):
                    pause.wrong.append(f"{canary.name}, {answer.cached_tokens or 0} cached: {answer.drift(known):.3g}")
        return pause

    def _ask(self, canary: Canary, salt: str) -> Generation:
        return self._completions.generate(canary.prompt, f"canary-{salt}")

    def _drained(self) -> float | None:
        """Slots in use once nothing runs or waits, or after `DRAIN_S`; None when the server does not say."""
        deadline = time.monotonic() + DRAIN_S
        time.sleep(SETTLE_S)
        while True:
            metrics = self._metrics()
            if not any(metrics.total(name) for name in RUNNING) or time.monotonic() > deadline:
                return metrics.total("inpage_slots_in_use")
            time.sleep(0.05)

    def _metrics(self) -> Metrics:
        return Metrics(self._completions.http.get("/metrics").text)

    # ------------------------------------------------------------------ memory
    @contextmanager
    def _watching_memory(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(SAMPLE_S):
                bytes_ = resident_bytes(self._server.pid)
                self._result.memory.append(MemorySample(requests=self._ended, resident_bytes=bytes_))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def check_ready(server: RunningServer) -> None:
    """Raise for status unless the server can reset its cache: `VLLM_SERVER_DEV_MODE=1`."""
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=30.0).raise_for_status()
