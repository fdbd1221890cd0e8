"""vLLM's `/v1/completions` with token ids in, tokens, logprobs and cached-token counts out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import httpx

from inpage.errors import ServerError

TOP_LOGPROBS = 3
"""Candidates compared at every position beside the sampled token."""


class ServerGoneError(ServerError):
    """The server closed the connection or no longer listens: its engine has probably stopped."""


@dataclass(frozen=True)
class Generation:
    """One answer: tokens, the log probabilities of the top candidates at every position, cached tokens."""

    tokens: tuple[str, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    cached_tokens: int | None

    def same_as(self, other: Generation) -> bool:
        """Equal to the bit: JSON carries floats so that they come back exactly."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs

    @property
    def finite(self) -> bool:
        """Whether every log probability is a number."""
        return all(math.isfinite(value) for top in self.logprobs for _, value in top)

    @property
    def token_ids(self) -> list[int]:
        """The tokens as ids; `ServerError` when the server sent texts instead."""
        try:
            return [int(token.removeprefix("token_id:")) for token in self.tokens]
        except ValueError as error:
            raise ServerError(
                f"the server sent {error} where a token id was asked for: it ignores return_tokens_as_token_ids"
            ) from error

    def drift(self, other: Generation) -> float:
        """The largest difference of a log probability, over the positions before the tokens part."""
        worst = 0.0
        for mine, theirs, token, other_token in zip(
            self.logprobs, other.logprobs, self.tokens, other.tokens, strict=False
        ):
            both = dict(mine).keys() & dict(theirs).keys()
            worst = max([worst, *(abs(dict(mine)[name] - dict(theirs)[name]) for name in both)])
            if token != other_token:
                break
        return worst


class Completions:
    """Sends prompts of token ids to one model of one server; threads may share it."""

    def __init__(
        self,
        base_url: str,
        model: str,
        output_tokens: int,
        timeout_s: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self.http = httpx.Client(base_url=base_url, timeout=timeout_s, headers=dict(headers or {}), limits=limits)
        self.model = model
        self.output_tokens = output_tokens
        self.answered = 0
        """Requests that were answered to their end; those that `stream` cut off are not among them."""
        self._lock = Lock()

    def generate(self, prompt: Sequence[int], salt: str, output_tokens: int | None = None) -> Generation:
        """Greedy decoding under a cache salt; raises `ServerError` when the server refuses."""
        body = self._body(list(prompt), salt, output_tokens or self.output_tokens)
        body |= {"logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True}
        answer = self._post(body, f"a prompt of {len(prompt)} tokens")
        choice = answer["choices"][0]
        if not choice.get("logprobs"):
            raise ServerError("the server sends no logprobs with its completions")
        return Generation(
            tokens=tuple(choice["logprobs"]["tokens"]),
            logprobs=tuple(tuple(sorted(top.items())) for top in choice["logprobs"]["top_logprobs"]),
            cached_tokens=cached_tokens(answer),
        )

    def text(self, prompt: str, salt: str, output_tokens: int) -> tuple[str, int, int | None]:
        """Greedy continuation of a text: the text, the prompt's tokens, the cached ones among them."""
        body = self._body(prompt, salt, output_tokens) | {"ignore_eos": False}
        answer = self._post(body, f"a text of {len(prompt)} characters")
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], cached_tokens(answer)

    @contextmanager
    def stream(self, prompt: Sequence[int], salt: str, output_tokens: int) -> Iterator[Iterator[str]]:
        """The events of an answer as they come; leaving the block early cuts the connection: an abort."""
        body = self._body(list(prompt), salt, output_tokens) | {"stream": True}
        try:
            with self.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServerError(_refusal(response, f"a prompt of {len(prompt)} tokens"))
                yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))
        except httpx.TransportError as error:
            raise ServerGoneError(f"no answer to a prompt of {len(prompt)} tokens: {error!r}") from error

    def _body(self, prompt: list[int] | str, salt: str, output_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }

    def _post(self, body: dict[str, Any], what: str) -> dict[str, Any]:
        try:
            response = self.http.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            raise ServerGoneError(f"no answer to {what}: {error!r}") from error
        if response.status_code != 200:
            raise ServerError(_refusal(response, what))
        with self._lock:
            self.answered += 1
        try:
            answer: dict[str, Any] = response.json()
        except json.JSONDecodeError as error:
            raise ServerError(f"the answer to {what} is not JSON: {error}") from error
        return answer


def cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """Cached prompt tokens as the answer's usage has them; None when it does not say (vLLM omits zero too)."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    count: int | None = details.get("cached_tokens")
    return count


def _refusal(response: httpx.Response, what: str) -> str:
    return f"HTTP {response.status_code} to {what}: {response.text[:300]}"


Generate = Callable[[Sequence[int], str], Generation]
"""What compares needs of a server: a prompt under a salt, answered greedily."""
