"""Recorded traffic: Mooncake's JSONL and agentic coding traces, plain or .gz, read as a whole or not at all.

Both give, for each request, its lengths and the ids of its prompt's pieces: equal ids are equal text. An id
is turned into tokens by a fixed rule, so that prompts share exactly the prefixes that they shared when they
were recorded. What no id says is unique: a last piece that is cut short, and the generated tokens.

| format   | a file is                          | ids of     | a session is                                      |
|----------|------------------------------------|------------|---------------------------------------------------|
| Mooncake | one JSON object a line             | 512 tokens | one request: the trace does not say who sent it   |
| agentic  | one conversation as a JSON object  | 64 tokens  | the conversation; each subagent is one beside it  |

In agentic traces ids count within the file. The first `tool_tokens` of a prompt are the tools' definitions,
which conversations share when they have equally many; everything after that is their own.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from inpage.errors import ConfigError

MOONCAKE_PIECE = 512


@dataclass(frozen=True)
class Turn:
    """One request. `pieces` are keys of the prompt's pieces of `piece_tokens` tokens, the last maybe shorter.

    `gap` is in seconds: from the end of the turn before, or from the session's start for the first.
    """

    pieces: tuple[tuple[str, int], ...]
    piece_tokens: int
    prompt_tokens: int
    output_tokens: int
    gap: float

    def prompt(self) -> list[int]:
        """The prompt's tokens, a function of the pieces."""
        text = b"".join(_piece(scope, number, self.piece_tokens) for scope, number in self.pieces)
        return list(text[: self.prompt_tokens])

    def shared_with(self, other: Turn) -> int:
        """Tokens of the longest prefix that both prompts have, by whole pieces."""
        same = 0
        for mine, theirs in zip(self.pieces, other.pieces, strict=False):
            if mine != theirs:
                break
            same += self.piece_tokens
        return min(same, self.prompt_tokens, other.prompt_tokens)


@dataclass(frozen=True)
class Session:
    """Turns that follow one another; `start` is in seconds, from the trace's or, of a subagent, its parent's."""

    name: str
    start: float
    turns: tuple[Turn, ...]


@lru_cache(maxsize=32768)
def _piece(scope: str, number: int, length: int) -> bytes:
    """Tokens of a piece, one a byte: the same on every machine, and no two pieces alike."""
    return hashlib.shake_256(f"{scope}/{number}".encode()).digest(length)


def read_traces(paths: Sequence[Path]) -> list[Session]:
    """All sessions of these files; a folder stands for the files in it. Raises `ConfigError` with file and line."""
    sessions: list[Session] = []
    for path in _files(paths):
        text = _text(path)
        first = text.lstrip()[:1]
        if not first:
            raise ConfigError(f"{path} is empty: a trace has at least one request")
        sessions += _agentic(path, text) if _is_one_object(text) else _mooncake(path, text)
    return sessions


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.removesuffix(".gz").endswith((".json", ".jsonl")))
            if not inside:
                raise ConfigError(f"{path} has no trace in it: no .json or .jsonl, plain or .gz")
            yield from inside
        else:
            yield path


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no trace: {error}") from error


def _is_one_object(text: str) -> bool:
    """Whether the first line alone is not a whole object with a `timestamp`."""
    try:
        return "timestamp" not in json.loads(text.lstrip().split("\n", 1)[0])
    except ValueError:
        return True


class _Reader:
    """Fields of one JSON object, with the place of it for errors."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place}: a request is a JSON object, not {str(value)[:40]!r}")
        self.value, self.place = value, place

    def number(self, name: str, default: float | None = None, least: float = 0) -> float:
        number = self.value.get(name, default)
        if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < 1e12:
            raise ConfigError(f"{self.place}: {name!r} must be a number of at least {least:g}, not {number!r}")
        return number

    def count(self, name: str, default: int | None = None, least: int = 0) -> int:
        number = self.number(name, default, least)
        if number != int(number):
            raise ConfigError(f"{self.place}: {name!r} must be whole, not {number!r}")
        return int(number)

    def ids(self, tokens: int, piece: int) -> list[int]:
        ids = self.value.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{self.place}: 'hash_ids' must be a list of whole numbers")
        needed = -(-tokens // piece)
        if len(ids) < needed - 1 or len(ids) > needed + 1:
            raise ConfigError(
                f"{self.place}: {tokens} tokens are {needed} pieces of {piece}, but 'hash_ids' has {len(ids)}"
            )
        return ids


def _mooncake(path: Path, text: str) -> list[Session]:
    sessions = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            reader = _Reader(json.loads(line), place)
        except ValueError as error:
            raise ConfigError(f"{place}: no JSON ({error})") from error
        tokens = reader.count("input_length", least=1)
        turn = Turn(
            _keys((("mooncake", i) for i in reader.ids(tokens, MOONCAKE_PIECE)), tokens, MOONCAKE_PIECE, place),
            MOONCAKE_PIECE,
            tokens,
            reader.count("output_length", least=1),
            0.0,
        )
        sessions.append(Session(f"{path.name}:{number}", reader.number("timestamp") / 1000, (turn,)))
    return sessions


def _agentic(path: Path, text: str) -> list[Session]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}, line {getattr(error, 'lineno', 1)}: no JSON ({error})") from error
    reader = _Reader(value, str(path))
    piece = reader.count("block_size", 64, least=1)
    sessions = list(_conversation(reader, str(value.get("id", path.name)), piece, 0.0, path))
    if not any(session.turns for session in sessions):
        raise ConfigError(f"{path} has no requests")
    return [session for session in sessions if session.turns]


def _conversation(reader: _Reader, name: str, piece: int, start: float, path: Path) -> Iterator[Session]:
    """The conversation's own turns, then its subagents' as sessions beside it."""
    requests = reader.value.get("requests")
    if not isinstance(requests, list):
        raise ConfigError(f"{reader.place}: 'requests' must be a list")
    tools = reader.count("tool_tokens", 0)
    scope = name.split("/")[0]
    turns: list[Turn] = []
    beside: list[Session] = []
    ended = 0.0
    for number, value in enumerate(requests, start=1):
        place = f"{reader.place}, request {number}"
        request = _Reader(value, place)
        if "requests" in request.value:
            inner = f"{name}/{request.value.get('agent_id', number)}"
            beside += _conversation(request, inner, piece, start + request.number("t"), path)
            continue
        tokens, at = request.count("in", least=1), request.number("t")
        shared = tools // piece
        keys = [
            (f"tools {tools}" if i < shared else scope, i if i < shared else id_)
            for i, id_ in enumerate(request.ids(tokens, piece))
        ]
        turns.append(
            Turn(_keys(keys, tokens, piece, place), piece, tokens, max(1, request.count("out")), max(0.0, at - ended))
        )
        ended = at + request.number("api_time", 0.0)
    yield Session(name, start, tuple(turns))
    yield from beside


def _keys(keys: Iterable[tuple[str, int]], tokens: int, piece: int, place: str) -> tuple[tuple[str, int], ...]:
    """As many pieces as the tokens need; a missing last one is unique to its request."""
    found = list(keys)[: -(-tokens // piece)]
    if len(found) * piece < tokens:
        found.append((place, -1))
    return tuple(found)
