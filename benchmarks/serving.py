"""In-page beside native on real servers, asked in turns: cold TTFT and decode rate.

A token budget of 320 lets both end their prefill chunks on 256 tokens, so that both do the same work; what differs is
the copying of states: native from block to block, in-page between slots and pages. The server that is not asked is
stopped by a signal for that time: vLLM's processes poll, and the workers of both servers are bound to the same core.
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
from dataclasses import replace
from pathlib import Path

from inpage.demo.cases import CASES
from inpage.demo.command import PARITY_VOCAB, server_arguments
from inpage.demo.model import make_model
from inpage.demo.server import RunningServer, ServerProcess
from inpage.gates.parity import Completions

BUDGET = 320
LAYOUTS = ("in-page", "native")


def rows() -> Iterator[tuple[str, ...]]:
    """Medians of both, and the median of the ratios of neighbouring asks, which a drifting machine spoils least."""
    rng = random.Random(0)
    arguments = server_arguments(replace(CASES["arms"], budget=BUDGET))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(make_model(Path(folder) / "model"))
        servers: dict[str, RunningServer] = {}
        for layout in LAYOUTS:
            log = Path(folder) / f"{layout}.log"
            process = ServerProcess(model, arguments, layout, log, {"VLLM_CPU_KVCACHE_SPACE": "1"})
            stack.callback(process.stop)
            servers[layout] = process.wait()
            stack.callback(os.killpg, servers[layout].pid, signal.SIGCONT)
            os.killpg(servers[layout].pid, signal.SIGSTOP)

        def ask(layout: str, tokens: int, output: int) -> float:
            prompt = [rng.randrange(PARITY_VOCAB) for _ in range(tokens)]
            began = time.perf_counter()
            Completions(servers[layout].url, model, output).generate(prompt, uuid.uuid4().hex)
            return time.perf_counter() - began

        def compared(tokens: int, output: int, rounds: int) -> tuple[float, float, float]:
            times: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
            for round_ in range(rounds):
                for layout in LAYOUTS if round_ % 2 else reversed(LAYOUTS):
                    os.killpg(servers[layout].pid, signal.SIGCONT)
                    ask(layout, 8, 4)  # awake again
                    times[layout].append(ask(layout, tokens, output))
                    os.killpg(servers[layout].pid, signal.SIGSTOP)
            ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
            mine, theirs = map(statistics.median, times.values())
            return mine, theirs, ratio

        mine, theirs, ratio = compared(tokens=4096, output=1, rounds=25)
        yield (
            "cold TTFT, 4,096 tokens, real servers",
            f"{mine:.3f} s in-page",
            f"{theirs:.3f} s native",
            f"{ratio:.3f}",
            "at most 1.03",
        )
        mine, theirs, ratio = compared(tokens=8, output=49, rounds=150)
        yield (
            "decode, 48 tokens, real servers",
            f"{48 / mine:.1f} tokens/s in-page",
            f"{48 / theirs:.1f} tokens/s native",
            f"{1 / ratio:.3f}",
            "at least 0.97",
        )
