from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest

from inpage.errors import ConfigError, ServerError
from inpage.replay.result import TurnRecord, summarize
from inpage.replay.runner import ReplayInterrupted, replay_arm, run_replay
from inpage.replay.sessions import SessionSpec


def test_every_turn_of_every_session_is_measured(double: Any, small: SessionSpec) -> None:
    result = replay_arm(double.url, small, arm="in-page")
    assert [(t.session, t.turn) for t in result.turns] == [(s, t) for s in (0, 1) for t in (1, 2, 3, 4)]
    assert result.complete
    assert result.note == ""
    for turn in result.turns:
        assert turn.prompt_tokens == pytest.approx(small.prompt_tokens(turn.turn), abs=6)
        assert turn.completion_tokens == 8
        assert turn.ttft_s is not None
        assert 0 < turn.ttft_s < turn.total_s <= result.wall_s
        assert turn.decode_tok_s is not None
    assert (result.arm, result.model, result.server_version) == ("in-page", "tiny", "0.0.double")
    assert result.settings == small


def test_later_turns_hit_on_the_turn_before_and_first_turns_on_nothing_but_the_shared_part(
    double: Any, small: SessionSpec
) -> None:
    result = replay_arm(double.url, small, arm="x")
    first = [t.cached_tokens or 0 for t in result.turns if t.turn == 1]
    assert min(first) == 0
    assert max(first) <= small.system_tokens
    for turn in result.turns:
        if turn.turn > 1:
            assert turn.cached_tokens == pytest.approx(small.prompt_tokens(turn.turn - 1), abs=64 + 16)


def test_every_arm_gets_the_same_bytes_whatever_it_answers(double: Any, small: SessionSpec) -> None:
    def sent() -> list[str]:
        return sorted(json.dumps(r, sort_keys=True) for r in double.requests)

    one = replay_arm(double.url, small, arm="off")
    before = sent()
    double.requests.clear()
    double.cache.clear()
    double.delay_s = 0.01
    two = replay_arm(double.url, small, arm="in-page")
    assert before == sent()
    assert one.transcript_digest == two.transcript_digest


def test_sessions_run_at_once_and_their_turns_one_after_another(double: Any, small: SessionSpec) -> None:
    double.delay_s = 0.05
    replay_arm(double.url, replace(small, sessions=5), arm="x", warmup=False)
    assert double.most_running == 5
    lengths: dict[str, list[int]] = {}
    for body in double.requests:
        lengths.setdefault(body["messages"][1]["content"], []).append(len(body["messages"]))
    assert list(lengths.values()) == [[2, 4, 6, 8]] * 5


def test_warm_up_is_another_text_and_not_measured(double: Any, small: SessionSpec) -> None:
    result = replay_arm(double.url, small, arm="x", warmup=True)
    warm, measured = double.requests[:2], double.requests[2:]
    assert [len(body["messages"]) for body in warm] == [2, 4]
    assert len(result.turns) == len(measured) == 8
    assert not {b["messages"][0]["content"] for b in warm} & {b["messages"][0]["content"] for b in measured}
    double.requests.clear()
    replay_arm(double.url, small, arm="x", warmup=False)
    assert len(double.requests) == 8


def test_a_failed_turn_ends_its_session_and_the_others_go_on(double: Any, small: SessionSpec) -> None:
    chosen: list[str] = []

    def refuse(body: dict[str, Any]) -> tuple[int, str] | None:
        if not body["stream"] or len(body["messages"]) < 4:
            return None
        chosen[:] = chosen or [body["messages"][1]["content"]]
        return (503, "overloaded") if body["messages"][1]["content"] == chosen[0] else None

    double.refuse = refuse
    result = replay_arm(double.url, small, arm="x", warmup=False)
    failed = [t for t in result.turns if t.error is not None]
    assert [(t.turn, t.error) for t in failed] == [(2, "HTTP 503: overloaded")]
    assert len(result.turns) == 6
    assert not result.complete
    assert summarize(result).errors == 1


def test_a_failed_warm_up_stops_before_anything_is_measured(double: Any, small: SessionSpec) -> None:
    double.refuse = lambda body: (500, "no") if body["stream"] else None
    with pytest.raises(ServerError, match="the warm-up failed at turn 1: HTTP 500: no"):
        replay_arm(double.url, small, arm="x")


def test_no_server_is_one_clear_error(small: SessionSpec) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ServerError, match=rf"no server answers at {url}: .*`inpage serve MODEL`"):
            replay_arm(url, small, arm="x")


def test_a_context_beyond_the_servers_is_refused_before_anything_is_sent(double: Any, small: SessionSpec) -> None:
    double.models = {"data": [{"id": "tiny", "max_model_len": 4507}]}
    with pytest.raises(ConfigError, match=r"turn 4 needs 4500 prompt and 8 output .* --end-tokens to at most 4499"):
        replay_arm(double.url, small, arm="x")
    assert double.requests == double.counts == []
    double.models = {"data": [{"id": "tiny", "max_model_len": 4508}]}
    assert replay_arm(double.url, small, arm="x").complete


def test_a_server_that_had_seen_the_transcripts_is_told_on(double: Any, small: SessionSpec) -> None:
    replay_arm(double.url, small, arm="x")
    again = replay_arm(double.url, small, arm="x")
    assert "the server had seen these transcripts; restart it or take another --seed" in again.note


def test_a_count_left_out_for_zero_is_zero_once_others_come(double: Any, small: SessionSpec) -> None:
    double.omits_zero = True
    result = replay_arm(double.url, small, arm="x")
    assert None in {t.cached_tokens for t in result.turns}
    counted = [t.cached_tokens or 0 for t in result.turns]
    assert summarize(result).hit_rate_all == sum(counted) / sum(t.prompt_tokens or 0 for t in result.turns)


def test_on_turn_hears_of_every_turn_in_the_async_call_too(double: Any, small: SessionSpec) -> None:
    heard: list[TurnRecord] = []
    result = asyncio.run(run_replay(double.url, small, arm="x", on_turn=heard.append, plain=True))
    assert sorted(heard, key=lambda t: (t.session, t.turn)) == result.turns
    assert result.plain
    assert result.server_version is None


def test_an_interruption_keeps_what_was_measured(double: Any, small: SessionSpec) -> None:
    heard: list[TurnRecord] = []

    def on_turn(turn: TurnRecord) -> None:
        heard.append(turn)
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(ReplayInterrupted) as caught:
        replay_arm(double.url, small, arm="x", on_turn=on_turn)
    assert caught.value.result.note == "interrupted"
    assert len(caught.value.result.turns) == 3
    assert not caught.value.result.complete


def test_an_interruption_before_the_measurement_is_an_ordinary_one(double: Any, small: SessionSpec) -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, str] | None:
        os.kill(os.getpid(), signal.SIGINT)
        return None

    double.refuse = refuse
    # A shell that runs the tests in the background lets them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            replay_arm(double.url, small, arm="x")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(caught.value, ReplayInterrupted)


def test_every_turn_of_a_session_names_it_for_a_router_and_nothing_else_does(double: Any, small: SessionSpec) -> None:
    result = replay_arm(double.url, small, arm="in-page", session_header="X-Conversation")
    named = [headers["X-Conversation"] for headers in double.headers if "X-Conversation" in headers]
    assert sorted(named) == sorted(f"{result.transcript_digest[:12]}-{session}" for session in (0, 1) for _ in range(4))
    assert len(double.headers) > len(named)  # calibration and warm-up belong to no session
    double.headers.clear()
    replay_arm(double.url, small, arm="again")
    assert {headers["x-session-id"] for headers in double.headers if "x-session-id" in headers} == set(named)


def test_a_name_that_is_no_header_is_refused(double: Any, small: SessionSpec) -> None:
    with pytest.raises(ConfigError, match="--session-header is 'x y'"):
        replay_arm(double.url, small, arm="in-page", session_header="x y")
