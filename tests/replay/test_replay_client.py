from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from inpage.errors import ConfigError, ServerError
from inpage.replay.client import Answer, Reading, Served, Server

T = TypeVar("T")
ASK = [{"role": "user", "content": "hello"}]


def event(data: Any) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage(**counts: Any) -> bytes:
    return event({"choices": [], "usage": counts})


ROLE, DONE = chunk(role="assistant", content=""), event("[DONE]")


def with_server(double: Any, use: Callable[[Server], Awaitable[T]], **options: Any) -> T:
    async def main() -> T:
        async with Server(double.url, **({"plain": False, "timeout_s": 5.0} | options)) as server:
            server.model = "tiny"
            return await use(server)

    return asyncio.run(main())


def ask(double: Any, *pieces: bytes, silence_s: float = 0.0, **options: Any) -> Answer:
    """The answer to one request, to which the double sends these pieces after a silence."""

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        time.sleep(silence_s)
        yield from pieces

    double.script = script
    return with_server(double, lambda server: server.stream(ASK, [], 4), **options)


def read(*pieces: tuple[float, bytes]) -> Answer:
    """The answer that comes in these pieces, each at a given time in seconds."""
    reading = Reading()
    for now, piece in pieces:
        reading.take(piece, now)
    reading.finish("text/event-stream", 9.0)
    assert reading.answer.error is None
    return reading.answer


def test_ttft_is_the_first_text_and_not_the_announcement_of_the_role() -> None:
    assert read((1.0, ROLE), (2.0, chunk(content="a")), (3.0, chunk("stop", content="b")), (3.0, DONE)).ttft_s == 2.0


def test_a_chunk_without_text_or_role_is_a_token_because_it_may_be_part_of_a_character() -> None:
    assert read((1.0, ROLE), (2.0, chunk(content="")), (3.0, chunk("stop", content="é"))).ttft_s == 2.0


def test_a_role_that_comes_with_text_is_a_token() -> None:
    assert read((1.0, chunk(role="assistant", content="a")), (2.0, chunk("stop"))).ttft_s == 1.0


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_tokens_too(delta: dict[str, Any]) -> None:
    assert read((1.0, chunk(role="assistant", **delta)), (2.0, chunk("stop"))).ttft_s == 1.0


def test_a_single_chunk_that_finishes_without_text_still_has_a_ttft() -> None:
    counts = usage(prompt_tokens=5, completion_tokens=1)
    answer = read((1.0, ROLE), (2.0, chunk("length", content="") + counts + DONE))
    assert (answer.ttft_s, answer.decode_tok_s) == (2.0, None)


def test_a_server_that_names_the_role_on_every_silent_chunk_has_the_first_as_ttft() -> None:
    assert read((1.0, ROLE), (2.0, ROLE), (3.0, DONE)).ttft_s == 1.0


def test_decode_rate_is_the_tokens_after_the_first_over_the_time_after_it() -> None:
    counts = usage(prompt_tokens=5, completion_tokens=21, prompt_tokens_details={"cached_tokens": 3})
    answer = read((1.0, ROLE + chunk(content="a")), (3.0, chunk("length", content="b")), (8.0, counts + DONE))
    assert (answer.ttft_s, answer.decode_tok_s) == (1.0, 10.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (5, 3, 21)


def test_counts_that_never_come_are_not_reported() -> None:
    answer = read((1.0, ROLE + chunk(content="a")), (2.0, chunk("stop", content="a") + DONE))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (None, None, None)
    assert answer.decode_tok_s is None


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}, 7])
def test_usage_without_a_cached_count_leaves_it_not_reported(details: Any) -> None:
    counts = usage(prompt_tokens=5, completion_tokens=1, prompt_tokens_details=details)
    assert read((1.0, chunk("stop", content="a") + counts)).cached_tokens is None


def test_usage_on_every_chunk_leaves_the_last_count() -> None:
    def counted(n: int, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": finish}
        return event({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": n}})

    assert read((1.0, counted(1)), (2.0, counted(2, "stop"))).completion_tokens == 2


def test_a_stream_over_http_is_timed_from_the_request_on(double: Any) -> None:
    answer = ask(double, ROLE, chunk("stop", content="a"), DONE, silence_s=0.1)
    assert answer.error is None
    assert answer.ttft_s is not None
    assert 0.1 <= answer.ttft_s <= answer.total_s


def test_an_error_in_the_stream_is_recorded_and_cut_to_300_characters(double: Any) -> None:
    answer = ask(double, ROLE, chunk(content="a"), event({"error": {"message": "x" * 900}}), DONE)
    assert answer.error is not None
    assert answer.error.startswith('error in the stream: {"message": "xxx')
    assert len(answer.error) < 340


def test_an_unreadable_event_is_an_error(double: Any) -> None:
    assert "unreadable event in the stream: <html>" in str(ask(double, event("<html>"), DONE).error)


def test_a_stream_that_breaks_off_is_an_error(double: Any) -> None:
    assert "the stream ended early (text/event-stream)" in str(ask(double, ROLE, chunk(content="a")).error)


def test_an_answer_that_is_no_stream_is_an_error_with_its_content_type(double: Any) -> None:
    double.content_type = "application/json"
    assert "(application/json)" in str(ask(double, b'{"choices": []}').error)


def test_a_finish_reason_is_end_enough_without_done(double: Any) -> None:
    assert ask(double, ROLE, chunk("stop", content="a")).error is None


def test_a_refused_request_is_recorded_with_status_and_the_first_300_characters(double: Any) -> None:
    double.refuse = lambda body: (400, "too\x1b long\n" + "x" * 900)
    error = str(ask(double).error)
    assert error.startswith("HTTP 400: too? long xxx")
    assert len(error) <= len("HTTP 400: ") + 300


def test_silence_beyond_the_timeout_is_an_error(double: Any) -> None:
    assert ask(double, ROLE, silence_s=1.0, timeout_s=0.2).error == "nothing came from the server for 0.2 s"


def test_a_request_is_what_agents_send_and_exactly_long(double: Any) -> None:
    tools = [{"type": "function", "function": {"name": "x"}}]
    with_server(double, lambda server: server.stream(ASK, tools, 4), api_key="key")
    assert double.requests[0] == {
        "model": "tiny",
        "messages": ASK,
        "tools": tools,
        "tool_choice": "none",
        "max_tokens": 4,
        "min_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert double.headers[0]["Authorization"] == "Bearer key"


def test_plain_leaves_out_what_only_vllm_understands(double: Any) -> None:
    with_server(double, lambda server: server.stream(ASK, [], 4), plain=True)
    assert not {"min_tokens", "ignore_eos"} & set(double.requests[0])
    assert "Authorization" not in double.headers[0]


def test_the_server_says_what_it_serves(double: Any) -> None:
    assert with_server(double, lambda s: s.identify(None)) == Served("tiny", 100_000, "0.0.double")
    assert with_server(double, lambda s: s.identify("tiny"), plain=True) == Served("tiny", 100_000, None)


def test_a_model_that_is_not_served_is_refused_with_those_that_are(double: Any) -> None:
    with pytest.raises(ConfigError, match=r"does not serve 'big'; it serves tiny"):
        with_server(double, lambda s: s.identify("big"))


def test_a_server_without_a_list_of_models_needs_a_name(double: Any) -> None:
    double.models_status = 404
    with pytest.raises(ServerError, match="name one with --model"):
        with_server(double, lambda s: s.identify(None))
    assert with_server(double, lambda s: s.identify("any")).model == "any"


@pytest.mark.parametrize(("status", "models"), [(401, {"error": "no key"}), (200, "<html>"), (200, {"data": 3})])
def test_an_answer_that_is_no_list_of_models_is_quoted(double: Any, status: int, models: Any) -> None:
    double.models_status, double.models = status, models
    with pytest.raises(ServerError, match=rf"is not a list of models \(HTTP {status}: "):
        with_server(double, lambda s: s.identify(None))


def test_a_request_of_one_token_that_is_refused_is_quoted(double: Any) -> None:
    double.refuse = lambda body: (500, "out of memory")
    with pytest.raises(ServerError, match="refused a request of one token: HTTP 500: out of memory"):
        with_server(double, lambda s: s.count(ASK, []))


def test_a_server_without_prompt_counts_cannot_be_measured_in_tokens(double: Any) -> None:
    double.reports_usage = False
    with pytest.raises(ServerError, match=r"reports no usage\.prompt_tokens"):
        with_server(double, lambda s: s.count(ASK, []))


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://[::1"])
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a"):
        Server(url, plain=False, timeout_s=1.0)


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--timeout is 0"):
        Server("http://host", plain=False, timeout_s=0)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_in_v1_and_shows_no_password(tail: str) -> None:
    server = Server(f"http://me:secret@host:80/prefix{tail}", plain=False, timeout_s=1.0)
    assert server.url == "http://host/prefix"
