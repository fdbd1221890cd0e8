"""One OpenAI-compatible server over HTTP: what it serves, and one timed streaming request at a time."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from inpage.errors import ConfigError, ServerError
from inpage.replay.sessions import Message, Tool
from inpage.replay.sse import EventParser

ERROR_CHARS = 300
SESSION_HEADER = "x-session-id"
"""What routers that keep a session on its replica go by, such as one of `inpage route-config`; servers ignore it."""


@dataclass
class Answer:
    """One streamed answer; times in seconds since the request was sent, counts as the server reported.

    None is not reported or not there; `error` is None when the answer is whole. `decode_tok_s` is the
    tokens after the first over the time between the first and the last chunk.
    """

    ttft_s: float | None = None
    decode_tok_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Served:
    """What the server said about itself; `max_model_len` in tokens and `version` are None if it did not."""

    model: str
    max_model_len: int | None
    version: str | None


class Server:
    """An HTTP client bound to one server and, once `identify` has run, one model.

    `plain` leaves out what only vLLM understands; `timeout_s` is the longest silence allowed, which on a
    cold long prompt is the time to its first token; `session_header` names the session for a router.
    """

    def __init__(
        self,
        base_url: str,
        *,
        plain: bool,
        timeout_s: float,
        api_key: str | None = None,
        session_header: str = SESSION_HEADER,
    ) -> None:
        try:
            url = httpx.URL(base_url.strip())
        except httpx.InvalidURL as error:
            raise ConfigError(f"not a URL: {base_url!r} ({error})") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"not an HTTP URL: {base_url!r}; give one like http://127.0.0.1:8000")
        if not timeout_s > 0:
            raise ConfigError(f"--timeout is {timeout_s}: it must be above zero seconds")
        if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", session_header) is None:
            raise ConfigError(f"--session-header is {session_header!r}: not the name of an HTTP header")
        root = url.copy_with(path=url.path.rstrip("/").removesuffix("/v1") + "/", query=None, fragment=None)
        # The address is shown and stored, a user name and password in it are not.
        self.url = str(root.copy_with(username="", password="")).rstrip("/")
        self.plain = plain
        self.timeout_s = timeout_s
        self.session_header = session_header
        self.model = ""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=root,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def identify(self, model: str | None) -> Served:
        """Find the model to use: the named one, or the first that the server lists.

        Raises `ServerError` when nothing answers or no list comes, `ConfigError` for a name it does not have.
        """
        cards = await self._models()
        names = [str(card.get("id")) for card in cards]
        if model is None and not names:
            raise ServerError(f"{self.url}/v1/models lists no model; name one with --model")
        if model is not None and names and model not in names:
            raise ConfigError(f"{self.url} does not serve {model!r}; it serves {', '.join(names)}")
        self.model = model or names[0]
        card = next((card for card in cards if card.get("id") == self.model), {})
        length = card.get("max_model_len")
        return Served(self.model, length if isinstance(length, int) else None, await self._version())

    async def _models(self) -> list[dict[str, Any]]:
        try:
            response = await self._http.get("v1/models")
        except httpx.TransportError as error:
            raise ServerError(
                f"no server answers at {self.url}: {_describe(error)}; start one with `inpage serve MODEL`"
            ) from error
        if response.status_code == 404:
            return []
        try:
            cards = response.raise_for_status().json()["data"]
            return [card for card in cards if isinstance(card, dict)]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise ServerError(
                f"{self.url}/v1/models is not a list of models (HTTP {response.status_code}: {_clean(response.text)})"
            ) from error

    async def _version(self) -> str | None:
        if self.plain:
            return None
        try:
            version = (await self._http.get("version")).json()["version"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None
        return str(version)

    async def count(self, messages: list[Message], tools: list[Tool]) -> int:
        """Prompt tokens of a request, from the usage of an answer of one token; raises `ServerError`."""
        body = self._body(messages, tools, 1) | {"stream": False}
        body.pop("stream_options")
        try:
            response = await self._http.post("v1/chat/completions", json=body)
            if response.status_code != 200:
                raise ServerError(f"{self.url} refused a request of one token: {_status(response)}")
            tokens = response.json()["usage"]["prompt_tokens"]
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} did not answer a request of one token: {_describe(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(
                f"{self.url} reports no usage.prompt_tokens, so sizes in tokens cannot be measured"
            ) from error
        return int(tokens)

    async def stream(
        self, messages: list[Message], tools: list[Tool], output_tokens: int, session: str | None = None
    ) -> Answer:
        """Send one request and time its stream; what goes wrong is in the answer's `error`, not raised."""
        headers = {} if session is None else {self.session_header: session}
        request = self._http.build_request(
            "POST", "v1/chat/completions", json=self._body(messages, tools, output_tokens), headers=headers
        )
        reading, start = Reading(), time.perf_counter()
        try:
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code != 200:
                    await response.aread()
                    reading.answer.error = _status(response)
                else:
                    async for chunk in response.aiter_bytes():
                        reading.take(chunk, time.perf_counter() - start)
                    content_type = response.headers.get("content-type", "no content type")
                    reading.finish(content_type, time.perf_counter() - start)
            finally:
                await response.aclose()
        except httpx.ReadTimeout:
            reading.answer.error = f"nothing came from the server for {self.timeout_s:g} s"
        except httpx.HTTPError as error:
            reading.answer.error = reading.answer.error or _describe(error)
        reading.answer.total_s = time.perf_counter() - start
        return reading.answer

    def _body(self, messages: list[Message], tools: list[Tool], output_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "tools": tools,
            "tool_choice": "none",
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.plain:
            body |= {"min_tokens": output_tokens, "ignore_eos": True}
        return body


class Reading:
    """An answer while its bytes come in; times are seconds since the request was sent."""

    def __init__(self) -> None:
        self.answer = Answer()
        self._parser = EventParser()
        self._announced: float | None = None
        self._last = 0.0
        self._ended = False

    def take(self, chunk: bytes, now: float) -> None:
        """Note the events that the bytes complete; after an error the rest is ignored."""
        self._events(self._parser.feed(chunk), now)

    def _events(self, events: list[str], now: float) -> None:
        for event in events:
            if self.answer.error is None:
                self._event(event.strip(), now)

    def _event(self, event: str, now: float) -> None:
        if event == "[DONE]":
            self._ended = True
            return
        try:
            data = json.loads(event)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            self.answer.error = f"unreadable event in the stream: {_clean(event)}"
            return
        if data.get("error"):
            self.answer.error = f"error in the stream: {_clean(json.dumps(data['error']))}"
            return
        self._usage(data.get("usage"))
        choices = data.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        self._ended = self._ended or choice.get("finish_reason") is not None
        if _is_announcement(choice):
            self._announced = self._announced or now
        else:
            self.answer.ttft_s = self.answer.ttft_s or now
            self._last = now

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.answer.prompt_tokens = _integer(usage.get("prompt_tokens"), self.answer.prompt_tokens)
        self.answer.completion_tokens = _integer(usage.get("completion_tokens"), self.answer.completion_tokens)
        self.answer.cached_tokens = _integer(cached, self.answer.cached_tokens)

    def finish(self, content_type: str, now: float) -> None:
        """Judge the end of the stream."""
        self._events(self._parser.close(), now)
        answer = self.answer
        if answer.error is not None:
            return
        if not self._ended:
            answer.error = f"the stream ended early ({content_type}): no finish reason and no [DONE]"
        elif answer.ttft_s is None:
            # A server that names the role on every chunk and sent no text (a token can be part of a
            # character): its first chunk is the closest to a first token that can be seen.
            answer.ttft_s = self._announced
        elif answer.completion_tokens is not None and answer.completion_tokens > 1 and self._last > answer.ttft_s:
            answer.decode_tok_s = (answer.completion_tokens - 1) / (self._last - answer.ttft_s)


def _is_announcement(choice: dict[str, Any]) -> bool:
    """Whether a chunk only names the role, as many servers send before there is a token.

    A chunk without text is a token all the same when it has no role: a token may be part of a character.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return "role" in delta and not any(value for key, value in delta.items() if key != "role")


def _integer(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise


def _status(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {_clean(response.text)}"


def _describe(error: Exception) -> str:
    return _clean(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _clean(text: str) -> str:
    """The first characters of a text from outside, on one line and without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:ERROR_CHARS])
