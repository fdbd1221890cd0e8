"""Real servers in pairs, asked in turns: cold TTFT and decode rate, in-page beside native and marks beside none.

A token budget of 320 lets both layouts end their prefill chunks on 256 tokens, so that both do the same work; what
differs is the copying of states: native from block to block, in-page between slots and pages. With marks a prompt of
4,000 tokens takes one more step, to 3,968, and one more save. The server that is not asked is stopped by a signal for
that time: vLLM's processes poll, and the workers of both servers are bound to the same core.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from inpage.demo.cases import CASES, WITH_MARKS, layout_of
from inpage.demo.command import PARITY_VOCAB, server_arguments
from inpage.demo.model import make_model
from inpage.demo.server import RunningServer, ServerProcess
from inpage.gates.parity import Completions

BUDGET = 320


@dataclass(frozen=True)
class Pairing:
    """An arm beside another: the prompt of the cold TTFT in tokens, and what is wanted of both ratios."""

    mine: str
    theirs: str
    prompt_tokens: int
    cold_at_most: float
    decode_at_least: float


PAIRINGS = (Pairing("in-page", "native", 4096, 1.03, 0.97), Pairing(WITH_MARKS, "in-page", 4000, 1 / 0.98, 0.98))


def rows() -> Iterator[tuple[str, ...]]:
    """Medians of both, and the median of the ratios of neighbouring asks, which a drifting machine spoils least."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder) / "model"))
        for pairing in PAIRINGS:
            yield from _compared(pairing, model, Path(folder))


def _compared(pairing: Pairing, model: str, folder: Path) -> Iterator[tuple[str, ...]]:
    rng = random.Random(0)
    case = replace(CASES["marks"], budget=BUDGET)
    arms = (pairing.mine, pairing.theirs)
    with ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for arm in arms:
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
            log = folder / f"{arm}.log"
            process = ServerProcess(model, server_arguments(case, arm), layout_of(arm), log, environment)
            stack.callback(process.stop)
            servers[arm] = process.wait()
            stack.callback(os.killpg, servers[arm].pid, signal.SIGCONT)
            os.killpg(servers[arm].pid, signal.SIGSTOP)

        def ask(arm: str, tokens: int, output: int) -> float:
            prompt = [rng.randrange(PARITY_VOCAB) for _ in range(tokens)]
            began = time.perf_counter()
            Completions(servers[arm].url, model, output).generate(prompt, uuid.uuid4().hex)
            return time.perf_counter() - began

        def medians(tokens: int, output: int, rounds: int) -> tuple[float, float, float]:
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for round_ in range(rounds):
                for arm in arms if round_ % 2 else reversed(arms):
                    os.killpg(servers[arm].pid, signal.SIGCONT)
                    ask(arm, 8, 4)  # awake again
                    times[arm].append(ask(arm, tokens, output))
                    os.killpg(servers[arm].pid, signal.SIGSTOP)
            ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
            mine, theirs = map(statistics.median, times.values())
            return mine, theirs, ratio

        mine, theirs, ratio = medians(pairing.prompt_tokens, output=1, rounds=25)
        yield (
            f"cold TTFT, {pairing.prompt_tokens:,} tokens, real servers",
            f"{mine:.3f} s {pairing.mine}",
            f"{theirs:.3f} s {pairing.theirs}",
            f"{ratio:.3f}",
            f"at most {pairing.cold_at_most:.2f}",
        )
        mine, theirs, ratio = medians(8, output=49, rounds=150)
        yield (
            "decode, 48 tokens, real servers",
            f"{48 / mine:.1f} tokens/s {pairing.mine}",
            f"{48 / theirs:.1f} tokens/s {pairing.theirs}",
            f"{1 / ratio:.3f}",
            f"at least {pairing.decode_at_least:.2f}",
        )
