"""Sends the stream of requests, so many at a time, hangs up where planned, and resets the cache meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from inpage.soak.workload import Planned

TIMEOUT_S = 300.0
MAX_ERRORS = 50
"""After so many failed requests the rest is not sent."""


@dataclass
class Tally:
    """What became of the requests of a stretch of load."""

    finished: int = 0
    tokens: int = 0
    aborted: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    resets: int = 0


class Load:
    """One client of one server."""

    def __init__(self, url: str, model: str, concurrency: int, done: Callable[[], None]) -> None:
        self._url, self._model, self._concurrency, self._done = url, model, concurrency, done

    def run(self, planned: Iterable[Planned], resets_every: int | None = None) -> Tally:
        """Send all of them and wait until each has ended; every `resets_every` requests the cache is reset."""
        return asyncio.run(self._run(planned, resets_every))

    async def _run(self, planned: Iterable[Planned], resets_every: int | None) -> Tally:
        tally = Tally()
        stream = iter(planned)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:

            async def worker() -> None:
                for request in stream:  # one iterator for all workers: each request is taken once
                    if len(tally.errors) >= MAX_ERRORS:
                        return
                    if resets_every and request.number % resets_every == resets_every // 2:
                        await self._reset(client, tally)
                    await self._one(client, request, tally)
                    self._done()

            await asyncio.gather(*(worker() for _ in range(self._concurrency)))
        return tally

    async def _one(self, client: httpx.AsyncClient, request: Planned, tally: Tally) -> None:
        try:
            if request.hang_up == "answering":
                await self._leave_while_answering(client, request, tally)
            elif request.hang_up is not None:
                await self._leave_unanswered(client, request, tally)
            else:
                await self._stay(client, request, tally)
        except httpx.HTTPError as error:
            tally.errors.append(f"request {request.number}, {len(request.prompt)} tokens: {error!r}")

    def _body(self, request: Planned, stream: bool) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": request.salt,
            "stream": stream,
        }

    async def _stay(self, client: httpx.AsyncClient, request: Planned, tally: Tally) -> None:
        response = await client.post("/v1/completions", json=self._body(request, stream=False))
        if response.status_code != 200:
            tally.errors.append(f"request {request.number}: HTTP {response.status_code}: {response.text[:300]}")
            return
        answered = response.json()["usage"]["completion_tokens"]
        if answered != request.output_tokens:
            tally.errors.append(f"request {request.number}: {answered} of {request.output_tokens} tokens")
            return
        tally.finished += 1
        tally.tokens += answered

    async def _leave_unanswered(self, client: httpx.AsyncClient, request: Planned, tally: Tally) -> None:
        posting = asyncio.ensure_future(self._stay(client, request, tally))
        await asyncio.sleep(request.patience_s)
        if posting.done():  # answered before the client lost patience
            await posting
            return
        posting.cancel()
        with suppress(asyncio.CancelledError):
            await posting
        tally.aborted[str(request.hang_up)] += 1

    async def _leave_while_answering(self, client: httpx.AsyncClient, request: Planned, tally: Tally) -> None:
        async with client.stream("POST", "/v1/completions", json=self._body(request, stream=True)) as response:
            if response.status_code != 200:
                await response.aread()
                tally.errors.append(f"request {request.number}: HTTP {response.status_code}: {response.text[:300]}")
                return
            answered = 0
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if "error" in json.loads(line[6:]):
                        tally.errors.append(f"request {request.number}: {line[6:300]}")
                        return
                    answered += 1
                if answered >= request.patience_tokens:
                    break
            tally.tokens += answered
        tally.aborted["answering"] += 1

    async def _reset(self, client: httpx.AsyncClient, tally: Tally) -> None:
        response = await client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if response.status_code != 200:
            tally.errors.append(f"resetting the cache: HTTP {response.status_code}: {response.text[:300]}")
        elif response.json().get("success"):
            tally.resets += 1
