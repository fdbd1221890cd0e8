"""In-page beside native on real servers that both run, asked in turns: cold TTFT and decode rate.

A token budget of 320 lets both end their prefill chunks on 256 tokens, so that both do the same work; what differs is
the copying of states: native from block to block, in-page between slots and pages.
"""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import in_turns
from inpage.demo.cases import CASES
from inpage.demo.command import PARITY_VOCAB, server_arguments
from inpage.demo.model import make_model
from inpage.demo.server import ServerProcess
from inpage.gates.parity import Completions

BUDGET, PROMPT, DECODED, ROUNDS = 320, 4096, 129, 9


def rows() -> Iterator[tuple[str, ...]]:
    """Median seconds of a cold prompt's first token, and of the tokens behind it."""
    rng = random.Random(0)
    arguments = server_arguments(replace(CASES["arms"], budget=BUDGET))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        model = str(make_model(Path(folder) / "model"))
        urls = {}
        for layout in ("in-page", "native"):
            log = Path(folder) / f"{layout}.log"
            process = ServerProcess(model, arguments, layout, log, {"VLLM_CPU_KVCACHE_SPACE": "1"})
            servers.callback(process.stop)
            urls[layout] = process.wait().url

        def ask(layout: str, tokens: int, output: int) -> float:
            prompt = [rng.randrange(PARITY_VOCAB) for _ in range(tokens)]
            began = time.perf_counter()
            Completions(urls[layout], model, output).generate(prompt, uuid.uuid4().hex)
            return time.perf_counter() - began

        mine, theirs = in_turns(lambda: ask("in-page", PROMPT, 1), lambda: ask("native", PROMPT, 1), ROUNDS)
        yield (
            f"cold TTFT, {PROMPT} tokens, real servers",
            f"{mine:.3f} s in-page",
            f"{theirs:.3f} s native",
            f"{mine / theirs:.3f}",
            "at most 1.03",
        )
        mine, theirs = in_turns(lambda: ask("in-page", 8, DECODED), lambda: ask("native", 8, DECODED), ROUNDS)
        rate, other = (DECODED - 1) / mine, (DECODED - 1) / theirs
        yield (
            f"decode, {DECODED - 1} tokens, real servers",
            f"{rate:.1f} tokens/s in-page",
            f"{other:.1f} tokens/s native",
            f"{rate / other:.3f}",
            "at least 0.97",
        )
