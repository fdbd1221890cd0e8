from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inpage.errors import ConfigError
from inpage.replay.sessions import (
    DECOY_TOOLS,
    TOOLS,
    WORDS,
    Calibration,
    SessionSpec,
    build,
    calibrate,
    total_turns,
    words,
)

BYTES = Calibration(per_word=6.0, fixed=1500.0, per_turn=40.0)
SPEC = SessionSpec(3, 4000, 8000, new_tokens=1000, output_tokens=60, system_tokens=3000, seed=1)


def byte_count(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> int:
    return len(json.dumps(tools)) + sum(len(m["content"]) + 20 for m in messages) + 11


async def counted(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> int:
    return byte_count(messages, tools)


def test_turns_are_counted_from_start_to_end() -> None:
    assert (SPEC.turns, total_turns(SPEC)) == (5, 15)
    assert [SPEC.prompt_tokens(t) for t in (1, 5)] == [4000, 8000]
    assert replace(SPEC, end_tokens=7999).turns == 4
    assert replace(SPEC, end_tokens=4000).turns == 1


def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "from inpage.replay.sessions import *;"
        "print(build(SessionSpec(3, 4000, 8000, 1000, 60, 3000, 1), Calibration(6.0, 1500.0, 40.0)).digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert other.stdout.strip() == build(SPEC, BYTES).digest


def test_another_seed_size_or_salt_gives_other_bytes() -> None:
    changed = [replace(SPEC, seed=2), replace(SPEC, sessions=2), replace(SPEC, output_tokens=61)]
    digests = {build(spec, BYTES).digest for spec in (SPEC, *changed)} | {build(SPEC, BYTES, salt="x").digest}
    assert len(digests) == 5


def test_a_turn_depends_on_seed_session_and_turn_alone() -> None:
    fewer = replace(SPEC, sessions=1, end_tokens=6000)
    assert build(SPEC, BYTES).messages(0, 3) == build(fewer, BYTES).messages(0, 3)


def test_every_turn_is_a_strict_prefix_of_the_next() -> None:
    transcripts = build(SPEC, BYTES)
    for session in range(SPEC.sessions):
        for turn in range(1, SPEC.turns):
            now, later = transcripts.messages(session, turn), transcripts.messages(session, turn + 1)
            assert later[: len(now)] == now
            assert [m["role"] for m in later[len(now) :]] == ["assistant", "user"]


def test_all_sessions_share_the_system_prompt_and_nothing_else() -> None:
    transcripts = build(SPEC, BYTES)
    assert len({transcripts.messages(s, 1)[0]["content"] for s in range(3)}) == 1
    texts = [m["content"] for s in range(3) for m in transcripts.messages(s, SPEC.turns)[1:]]
    assert len(set(texts)) == len(texts)


@settings(max_examples=40, deadline=None)
@given(st.integers(2000, 9000), st.integers(150, 2000), st.integers(1, 60), st.integers(0, 5), st.integers(0, 9))
def test_with_a_byte_tokenizer_every_prompt_is_within_a_word_of_its_size(
    start: int, new: int, output: int, turns: int, seed: int
) -> None:
    spec = SessionSpec(1, start, start + turns * new, new, output, system_tokens=start - 200, seed=seed)
    transcripts = build(spec, asyncio.run(calibrate(spec, counted)))
    for turn in range(1, spec.turns + 1):
        tokens = byte_count(transcripts.messages(0, turn), TOOLS)
        assert spec.prompt_tokens(turn) - 6 <= tokens <= spec.prompt_tokens(turn)


def test_with_words_of_uneven_cost_every_prompt_is_within_two_per_cent() -> None:
    cost = {word: 1 + (index % 3 == 0) for index, word in enumerate(WORDS)}

    def uneven(messages: list[dict[str, str]]) -> int:
        return 400 + sum(4 + sum(cost[w] for w in m["content"].split()) for m in messages)

    async def count(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> int:
        return uneven(messages)

    transcripts = build(SPEC, asyncio.run(calibrate(SPEC, count)))
    for turn in range(1, SPEC.turns + 1):
        assert uneven(transcripts.messages(0, turn)) == pytest.approx(SPEC.prompt_tokens(turn), rel=0.02)


def test_calibration_asks_three_times_and_shows_nothing_of_the_transcripts() -> None:
    asked: list[str] = []

    async def count(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> int:
        asked.append(json.dumps([tools, messages]))
        return byte_count(messages, tools)

    cost = asyncio.run(calibrate(SPEC, count))
    transcripts = build(SPEC, cost)
    sent = json.dumps([transcripts.tools, transcripts.messages(0, 1)])
    assert len(asked) == 3
    same = max(next(i for i, (a, b) in enumerate(zip(text, sent, strict=False)) if a != b) for text in asked)
    assert same < 64
    assert len(json.dumps(TOOLS)) == len(json.dumps(DECOY_TOOLS))


def test_words_are_all_of_one_length_and_a_deck_deals_each_once() -> None:
    assert {len(word) for word in WORDS} == {5}
    assert sorted(words("any", len(WORDS)).split()) == sorted(WORDS)
    assert words("any", 40) == words("any", 90)[: 40 * 6 - 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sessions": 0}, "--sessions is 0: at least one session is needed"),
        ({"output_tokens": 0}, "--output-tokens is 0: a turn generates at least one token"),
        ({"new_tokens": 0}, "--new-tokens is 0: every turn must add tokens"),
        ({"new_tokens": -5}, "--new-tokens is -5: every turn must add tokens"),
        ({"system_tokens": 0}, "--system-tokens is 0: it must be positive"),
        ({"start_tokens": 9000}, r"--start-tokens \(9000\) is above --end-tokens \(8000\)"),
        ({"system_tokens": 4000}, r"--system-tokens \(4000\) must be below --start-tokens \(4000\)"),
        ({"new_tokens": 60}, r"--new-tokens \(60\) must be above --output-tokens \(60\)"),
    ],
)
def test_sizes_that_make_no_session_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system_tokens": 1400}, r"--system-tokens \(1400\) is too small .* give at least 1506"),
        ({"system_tokens": 3998}, r"--start-tokens \(4000\) is too small"),
        ({"new_tokens": 90}, r"--new-tokens \(90\) is too small"),
    ],
)
def test_sizes_that_leave_no_room_for_text_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(replace(SPEC, **change), BYTES)


def test_a_server_that_counts_nothing_is_refused() -> None:
    async def count(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> int:
        return 7

    with pytest.raises(ConfigError, match="cannot be calibrated"):
        asyncio.run(calibrate(SPEC, count))
