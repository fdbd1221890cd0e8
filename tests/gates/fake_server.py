"""A double of vLLM's HTTP server, in this process: no model, a hash of the tokens instead of a state.

It is for the gates' logic and verdicts only; what real servers do is tested with real ones. `FakeServer(wrong=…)`
breaks one thing. As with a real model, a decode leaves another state than a prefill of the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from socket import SHUT_RDWR
from typing import Any

OUTPUTS = 4000
"""A stream lasts 20 s or until its client leaves, so a busy machine does not end it before a gate is ready."""


@dataclass(eq=False)
class InFlight:
    """A request that runs."""

    met: bool = False


@dataclass
class FakeServer:
    """A running double; use it as a context manager.

    wrong: one of "" (nothing), "hits" (a hit answers from a wrong state), "salts" (they do not separate),
    "slightly" (a hit is off by less than chunks make of it), "short hits" (a hit answers as if its prompt ended with
    the cached part), "unsteady" (no two runs are equal), "stale" (one-token prompts remember), "nan", "dies" (after
    some requests), "resumes" (a preempted request goes on from a wrong state), "sparse" (diverging prefixes miss),
    "no marks" (hits in whole blocks, whatever `unit` says), "copies" (a start inside a block harms the block it was
    copied from).

    chunk: blocks that a prefill chunk holds. With more than one, checkpoints are only where chunks ended, and an answer
    depends in its last bits on the size of the last chunk that ended on a boundary: products that round by shape.
    """

    wrong: str = ""
    block: int = 16
    caching: bool = True
    counts: str = "usage"
    reads: bool = False
    batch_noise: bool = False
    unit: int | None = None
    chunk: int | None = None
    states: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    dies_after: int = 12
    wrote: dict[tuple[str, tuple[int, ...]], list[int]] = field(default_factory=dict)
    harmed: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    max_model_len: int = 400
    pool: int = 40
    requests: int = 0
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    totals: dict[str, float] = field(default_factory=lambda: {"queries": 0, "hits": 0, "finished": 0, "preempted": 0})
    held: int = 0
    running: list[InFlight] = field(default_factory=list)

    def __enter__(self) -> FakeServer:
        self.lock = threading.RLock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    # ------------------------------------------------------------------ the engine
    @contextmanager
    def in_flight(self, blocks: int = 0) -> Iterator[InFlight]:
        """A request while it runs, and the blocks it holds meanwhile; those that meet remember it."""
        mine = InFlight()
        with self.lock:
            self.held += blocks
            self.running.append(mine)
            if len(self.running) > 1:
                for one in self.running:
                    one.met = True
        try:
            yield mine
        finally:
            with self.lock:
                self.running.remove(mine)
                self.held -= blocks

    def prefix(self, prompt: list[int], salt: str) -> int:
        """Tokens of the prompt that hit."""
        if not self.caching:
            return 0
        step = self.unit or self.block
        for end in range((len(prompt) - 1) // step * step, 0, -step):
            found = ("" if self.wrong == "salts" else salt, tuple(prompt[:end]))
            if found in self.cached and (self.chunk is None or found in self.states):
                return end
        return 0

    def chunk_ends(self, prompt: list[int], salt: str, start: int) -> list[int]:
        """Where the chunks of a prompt end, its start first: on its last boundary too, and where others parted."""
        last = len(prompt) // self.block * self.block
        known = [end for end in range(self.block, last + 1, self.block) if (salt, tuple(prompt[:end])) in self.cached]
        stops = [last, *known[-1:], len(prompt)]
        ends = [start]
        while ends[-1] < len(prompt):
            here = ends[-1]
            ends.append(min([here + (self.chunk or 1) * self.block, *(stop for stop in stops if stop > here)]))
        return ends

    def keep(self, prompt: list[int], salt: str) -> None:
        """Publish the prompt's boundaries."""
        last = len(prompt) // self.block * self.block
        ends = [*range(self.block, last + 1, self.block)] if self.wrong != "sparse" else [last]
        if self.unit and self.wrong != "no marks":
            ends.append(len(prompt) // self.unit * self.unit)
        self.cached |= {("" if self.wrong == "salts" else salt, tuple(prompt[:end])) for end in ends if end}

    def copy_harms(self, prompt: list[int], salt: str, cached: int) -> str:
        """A start inside a block spoils the block for the prompt that wrote it."""
        found = (salt, tuple(prompt[:cached]))
        if cached % self.block and prompt[cached:] != self.wrote.setdefault(found, prompt[cached:]):
            self.harmed.add(found)
        mark = len(prompt) // (self.unit or 1) * (self.unit or 1)
        self.wrote.setdefault((salt, tuple(prompt[:mark])), prompt[mark:])
        mine = self.wrote.get(found) == prompt[cached:]
        return "harmed" if mine and found in self.harmed else ""

    def run(self, prompt: list[int], outputs: int, twist: str = "") -> list[tuple[int, float]]:
        """Tokens and logprobs after a prompt; `twist` makes another state of it."""
        state = hashlib.sha256(f"{prompt}{twist}".encode()).digest()
        answer = []
        for _ in range(outputs):
            token = state[0] % 50
            answer.append((token, -int.from_bytes(state[1:7], "big") / 2**44))
            state = hashlib.sha256(state + bytes([token])).digest()
        return answer

    def complete(self, body: dict[str, Any], me: InFlight) -> dict[str, Any]:
        """One answer, as JSON has it."""
        with self.lock:
            prompt, salt = body["prompt"], body.get("cache_salt", "")
            self.requests += 1
            if isinstance(prompt, str):
                return self.read(prompt, salt)
            cached = self.prefix(prompt, salt)
            noise = 0.0
            if self.chunk:
                size = self.states.get((salt, tuple(prompt[:cached])), 0)
                for start, end in pairwise(self.chunk_ends(prompt, salt, cached)):
                    if end % self.block == 0:
                        size = self.states[salt, tuple(prompt[:end])] = (end - start) // self.block
                noise = 1e-3 * size
            if cached and self.wrong == "slightly":
                noise += 1e-6
            self.keep(prompt, salt)
            twist = "wrong state" if cached and self.wrong == "hits" else ""
            if self.wrong == "unsteady" or (self.wrong == "stale" and len(prompt) == 1):
                twist = f"run {self.requests}"
            if self.wrong == "copies":
                twist = self.copy_harms(prompt, salt, cached)
            if self.batch_noise and me.met:
                twist = "in a batch"
            known = prompt[:cached] if cached and self.wrong == "short hits" else prompt
            answer = [(token, lp + noise) for token, lp in self.run(known, body["max_tokens"], twist)]
            if self.held > self.pool // 2 and cached:  # preempted after three tokens, resumed with them as a prompt
                self.totals["preempted"] += 1
                ids = [token for token, _ in answer[:3]]
                rest = "wrong" if self.wrong == "resumes" else ""
                answer = answer[:3] + self.run(prompt + ids, len(answer) - 3, rest)
            self.count(len(prompt), cached)
        value = float("nan") if self.wrong == "nan" and self.requests > 9 else 0.0
        logprobs = {
            "tokens": [f"token_id:{token}" for token, _ in answer],
            "top_logprobs": [{f"token_id:{token}": lp + value, "token_id:99": lp - 1} for token, lp in answer],
        }
        return {"choices": [{"text": "", "logprobs": logprobs}], "usage": self.usage(len(prompt), cached)}

    def read(self, text: str, salt: str) -> dict[str, Any]:
        """A text is answered by looking the code up, if this double can read; one token a word."""
        words = [hash(word) for word in text.split()]
        cached = self.prefix(words, salt)
        self.keep(words, salt)
        self.count(len(words), cached)
        place = text.rsplit(" ", 2)[-2] if text.endswith(" is") else ""
        found = re.search(rf"The code of the {place} is (\d+)", text) if place and self.reads else None
        answer = f" {found[1]}." if found and not (cached and self.wrong == "hits") else " unknown."
        return {"choices": [{"text": answer}], "usage": self.usage(len(words), cached)}

    def count(self, queries: int, hits: int) -> None:
        """The counters of /metrics."""
        self.totals["queries"] += queries
        self.totals["hits"] += hits
        self.totals["finished"] += 1

    def usage(self, tokens: int, cached: int) -> dict[str, Any]:
        """As vLLM: no details for a count of zero."""
        details = {"cached_tokens": cached} if cached and self.counts == "usage" else None
        return {"prompt_tokens": tokens, "prompt_tokens_details": details}

    def metrics(self) -> str:
        """Prometheus text, as far as the gates read it."""
        if self.counts == "none":
            return ""
        labels = f'block_size="128",enable_prefix_caching="{self.caching}",num_gpu_blocks="{self.pool}"'
        labels += f',prefix_match_unit="{self.unit}"'
        labels += f',prefix_cache_retention_interval="{0 if self.wrong == "sparse" else None}"'
        return "\n".join(
            [
                "# HELP vllm:cache_config_info Information",
                f"vllm:cache_config_info{{{labels}}} 1.0",
                f'vllm:num_requests_running{{engine="0"}} {len(self.running)}.0',
                f'vllm:kv_cache_usage_perc{{engine="0"}} {min(self.held / (self.pool - 1), 1.0)}',
                f'vllm:prefix_cache_queries_total{{engine="0"}} {self.totals["queries"]}',
                f'vllm:prefix_cache_hits_total{{engine="0"}} {self.totals["hits"]}',
                f'vllm:num_preemptions_total{{engine="0"}} {self.totals["preempted"]}',
                f'vllm:request_success_total{{finished_reason="length"}} {self.totals["finished"]}',
            ]
        )


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def send(self, text: str, status: int = 200) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            answers = {
                "/v1/models": json.dumps({"data": [{"id": "fake", "max_model_len": server.max_model_len}]}),
                "/version": json.dumps({"version": "0.0.fake"}),
                "/metrics": server.metrics(),
            }
            self.send(answers.get(self.path, ""), 200 if self.path in answers else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.wrong == "dies" and server.requests > server.dies_after:
                self.connection.shutdown(SHUT_RDWR)
                self.close_connection = True
                return
            if body.get("stream"):
                self.stream(body)
                return
            with server.in_flight() as me:
                # Where the answer depends on the batch, long enough that requests meet on a busy machine too.
                time.sleep(0.003 * len(body["prompt"]) if server.batch_noise else 0.002)
                self.send(json.dumps(server.complete(body, me)))

        def stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            blocks = len(body["prompt"]) // server.block
            with server.in_flight(blocks), suppress(OSError):
                for _ in range(OUTPUTS):
                    self.wfile.write(b'data: {"choices": []}\n\n')
                    self.wfile.flush()
                    time.sleep(0.005)
                with server.lock:
                    server.totals["finished"] += 1
            self.close_connection = True

    return Handler
