from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inpage.replay.sse import EventParser

STREAM = (
    b": comment\n\n"
    b'data: {"a": 1}\n\n'
    b"event: x\r\nid: 3\r\ndata:no space\r\n\r\n"
    b"data: two\ndata: lines\n\n"
    b"data: two\r\ndata: more\r\n\r\n"
    b"data: carriage\r\rretry: 5\n\n" + "data: é€😀\n\n".encode() + b"data\n\n\n\n" + b"data: [DONE]"
)
EVENTS = ['{"a": 1}', "no space", "two\nlines", "two\nmore", "carriage", "é€😀", "[DONE]"]


def parse(pieces: list[bytes]) -> list[str]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)]


def test_events_come_out_whole_from_one_piece() -> None:
    assert parse([STREAM]) == EVENTS


def test_events_come_out_whole_byte_by_byte() -> None:
    assert parse([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_of_the_stream_gives_the_same_events(cuts: list[int]) -> None:
    assert parse(split(STREAM, cuts)) == EVENTS


@given(
    st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=20), max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 400), max_size=10),
)
def test_any_json_comes_through_any_split_with_any_line_end(texts: list[str], end: bytes, cuts: list[int]) -> None:
    events = [json.dumps(text, ensure_ascii=False) for text in texts]
    # Line separators inside a JSON string are escaped, so that only ASCII controls could break a line.
    stream = b"".join(b"data: " + event.encode() + end + end for event in events)
    assert parse(split(stream, cuts)) == events


def test_an_event_is_given_out_with_its_last_byte_and_not_later() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\r\n\r") == ["x"]
    assert parser.feed(b"\ndata: y\n") == []
    assert parser.feed(b"\n") == ["y"]
