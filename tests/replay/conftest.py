"""A test double of an OpenAI-compatible server: real HTTP and real SSE, no model behind it.

It counts one token per byte of a rendered prompt (tools first, then the messages), keeps every prompt it
has seen as its prefix cache (in blocks of 64 tokens), and can be told to misbehave.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inpage.replay.result import ArmResult, TurnRecord
from inpage.replay.sessions import SessionSpec

BLOCK = 64


def render(body: dict[str, Any]) -> bytes:
    said = "".join(f"<{m['role']}>{m['content']}<end>" for m in body["messages"])
    return (json.dumps(body["tools"]) + said + "<assistant>").encode()


def common(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def sse(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


class Double:
    """The double and its switches; `requests` holds every streamed body in the order of arrival."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 100_000}]}
        self.models_status = 200
        self.reports_usage = True
        self.reports_cached = True
        self.omits_zero = False
        self.delay_s = 0.0
        self.refuse: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda body: None
        self.script: Callable[[dict[str, Any]], Iterable[bytes]] | None = None
        self.content_type = "text/event-stream"
        self.requests: list[dict[str, Any]] = []
        self.counts: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.cache: list[bytes] = []
        self.running = 0
        self.most_running = 0
        self.lock = threading.Lock()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def answer(self, status: int, data: Any) -> None:
                text = data if isinstance(data, str) else json.dumps(data)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(double.models_status, double.models)
                elif self.path == "/version":
                    self.answer(200, {"version": "0.0.double"})
                else:
                    self.answer(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                double.headers.append(dict(self.headers))
                refusal = double.refuse(body)
                if refusal is not None:
                    self.answer(*refusal)
                elif not body["stream"]:
                    double.counts.append(body)
                    usage = {"usage": {"prompt_tokens": double.look_up(body)[0]}} if double.reports_usage else {}
                    self.answer(200, usage)
                else:
                    double.requests.append(body)
                    self.send_response(200)
                    self.send_header("Content-Type", double.content_type)
                    self.end_headers()
                    for piece in (double.script or double.stream)(body):
                        self.wfile.write(piece)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def look_up(self, body: dict[str, Any]) -> tuple[int, int]:
        """Prompt and cached tokens; the prompt is cached from then on."""
        prompt = render(body)
        with self.lock:
            shared = max((common(prompt, seen) for seen in self.cache), default=0)
            self.cache.append(prompt)
        return len(prompt), min(shared, len(prompt) - 1) // BLOCK * BLOCK

    def stream(self, body: dict[str, Any]) -> Iterator[bytes]:
        prompt, cached = self.look_up(body)
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(self.delay_s)
        yield b": a comment\n\n" + chunk({"role": "assistant", "content": ""})
        for token in range(body["max_tokens"]):
            last = token == body["max_tokens"] - 1
            yield chunk({"content": "é" if token % 2 else ""}, "length" if last else None)
            time.sleep(0.001)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        if self.reports_cached and (cached or not self.omits_zero):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.reports_usage:
            yield sse({"choices": [], "usage": usage})
        with self.lock:
            self.running -= 1
        yield sse("[DONE]")


@pytest.fixture
def double() -> Iterator[Double]:
    double = Double()
    thread = threading.Thread(target=double.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield double
    double.server.shutdown()
    double.server.server_close()


@pytest.fixture
def small() -> SessionSpec:
    """Two sessions of four turns, sized for the double's byte tokens (its tools alone take 1,370)."""
    return SessionSpec(2, 3000, 4500, new_tokens=500, output_tokens=8, system_tokens=2000, seed=0)


@pytest.fixture
def make_arm() -> Callable[..., ArmResult]:
    """Make an arm by hand: two sessions of two turns whose figures can be checked in the head."""

    def make(arm: str = "off", digest: str = "d" * 64, scale: float = 1.0, **changes: Any) -> ArmResult:
        turns = [
            TurnRecord(session=s, turn=t, prompt_tokens=p, cached_tokens=c, completion_tokens=11, total_s=9.0)
            for s, t, p, c in ((0, 1, 100, 0), (0, 2, 200, 80), (1, 1, 100, 60), (1, 2, 200, 100))
        ]
        timed = [
            turn.model_copy(update={"ttft_s": ttft * scale, "decode_tok_s": rate / scale})
            for turn, ttft, rate in zip(turns, (4.0, 1.0, 6.0, 3.0), (10.0, 20.0, 30.0, 40.0), strict=True)
        ]
        fields: dict[str, Any] = {
            "arm": arm,
            "model": "tiny",
            "base_url": "http://127.0.0.1:1",
            "settings": SessionSpec(2, 100, 200, new_tokens=100, output_tokens=11, system_tokens=50),
            "transcript_digest": digest,
            "started_at": "2026-11-30T10:00:00+00:00",
            "wall_s": 20.0 * scale,
            "turns": timed,
        }
        return ArmResult(**(fields | changes))

    return make
