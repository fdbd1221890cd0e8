"""What a replay measured, as stored in JSON, and the figures drawn from it: `DEFINITIONS` says how."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from inpage.errors import ConfigError
from inpage.replay.sessions import SessionSpec, total_turns

NOT_REPORTED = (
    "the server did not report cached tokens: start it with --enable-prompt-tokens-details "
    "(some releases of vLLM then still leave the count out as long as nothing at all is cached)"
)

# What each figure is; shown in every report.
DEFINITIONS = (
    ("TTFT", "seconds from sending a request to the first chunk that bears a token."),
    ("Decode rate", "(generated tokens − 1) / (last chunk − first chunk), per stream and turn."),
    ("Cached tokens", "the server's own count (usage.prompt_tokens_details); the table's are of later turns."),
    ("Prefilled tokens", "prompt − cached tokens, of later turns."),
    ("Hit rate", "cached / prompt tokens, both summed over the turns; later turns are all but the first."),
    ("Wall", "seconds from the first request to the end of the last, all sessions running at once."),
    (
        "Transcripts",
        "fixed by the seed and sent byte for byte alike to every arm; the assistant messages in the "
        "history are seeded text, not what the server generated.",
    ),
    ("Errors", "a turn that fails ends its session and enters no other figure."),
    ("Ceiling", "the hit rate if the whole prompt of the turn before came from the cache."),
)


class TurnRecord(BaseModel):
    """One request: session from 0, turn from 1, counts in tokens, times in seconds; None is not reported."""

    model_config = ConfigDict(frozen=True)

    session: int
    turn: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None
    decode_tok_s: float | None = None
    total_s: float
    error: str | None = None


class ArmResult(BaseModel):
    """One arm of a comparison: one replay against one server; `wall_s` in seconds."""

    arm: str
    model: str
    base_url: str
    settings: SessionSpec
    transcript_digest: str
    started_at: str
    wall_s: float
    turns: list[TurnRecord]
    note: str = ""
    plain: bool = False
    warmup: bool = True
    max_model_len: int | None = None
    server_version: str | None = None
    inpage_version: str = ""

    @property
    def complete(self) -> bool:
        """Whether every turn ran and none failed: only then do its figures compare with another arm's."""
        return len(self.turns) == total_turns(self.settings) and all(t.error is None for t in self.turns)


@dataclass(frozen=True)
class Stats:
    """Mean, median and 90th percentile (linear between the two nearest values)."""

    mean: float
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stats | None:
        """Describe the values that are not None; None when there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), percentile(known, 50), percentile(known, 90))


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation, as numpy's default; `values` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class TurnSummary:
    """The same turn over all sessions; token counts are means, `hit_rate` is between 0 and 1."""

    turn: int
    prompt_tokens: float | None
    cached_tokens: float | None
    hit_rate: float | None
    ttft_s: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """The figures of one arm; see the module's definitions. None is not reported or not there."""

    planned: int
    done: int
    errors: int
    wall_s: float
    ttft_first: Stats | None
    ttft_later: Stats | None
    decode_tok_s: Stats | None
    cached_per_later_turn: Stats | None
    prefilled_per_later_turn: Stats | None
    hit_rate_later: float | None
    hit_rate_all: float | None
    by_turn: tuple[TurnSummary, ...]


def summarize(result: ArmResult) -> Summary:
    """Compute the figures of one arm."""
    done = [turn for turn in result.turns if turn.error is None]
    # Next to turns that report a count, one without it had nothing cached: some servers leave out a zero.
    if any(turn.cached_tokens is not None for turn in done):
        done = [turn.model_copy(update={"cached_tokens": turn.cached_tokens or 0}) for turn in done]
    later = [turn for turn in done if turn.turn > 1]
    by_turn = []
    for number in sorted({turn.turn for turn in done}):
        same = [turn for turn in done if turn.turn == number]
        prompt, cached = Stats.of(t.prompt_tokens for t in same), Stats.of(t.cached_tokens for t in same)
        by_turn.append(
            TurnSummary(
                turn=number,
                prompt_tokens=prompt.mean if prompt else None,
                cached_tokens=cached.mean if cached else None,
                hit_rate=hit_rate(same),
                ttft_s=tuple(t.ttft_s for t in same if t.ttft_s is not None),
            )
        )
    return Summary(
        planned=total_turns(result.settings),
        done=len(done),
        errors=len(result.turns) - len(done),
        wall_s=result.wall_s,
        ttft_first=Stats.of(turn.ttft_s for turn in done if turn.turn == 1),
        ttft_later=Stats.of(turn.ttft_s for turn in later),
        decode_tok_s=Stats.of(turn.decode_tok_s for turn in done),
        cached_per_later_turn=Stats.of(turn.cached_tokens for turn in later),
        prefilled_per_later_turn=Stats.of(prefilled(later)),
        hit_rate_later=hit_rate(later),
        hit_rate_all=hit_rate(done),
        by_turn=tuple(by_turn),
    )


def prefilled(turns: Iterable[TurnRecord]) -> list[int]:
    """Tokens that were computed of each prompt, for the turns that have both counts."""
    return [t.prompt_tokens - t.cached_tokens for t in turns if t.cached_tokens is not None and t.prompt_tokens]


def prefill_by_arithmetic(result: ArmResult, unit_tokens: int) -> list[int]:
    """What each later turn has to compute when a pool loses nothing and hits come in units of so many tokens.

    A session sends the prompt of the turn before again: of its tokens the last unit is lost in part. The order is that
    of `prefilled` over the later turns.
    """
    sent = {(turn.session, turn.turn): turn.prompt_tokens or 0 for turn in result.turns if turn.error is None}
    return [
        turn.prompt_tokens - sent[turn.session, turn.turn - 1] // unit_tokens * unit_tokens
        for turn in result.turns
        if turn.turn > 1 and turn.error is None and turn.prompt_tokens and turn.cached_tokens is not None
    ]


def hit_rate(turns: Iterable[TurnRecord]) -> float | None:
    """Cached over prompt tokens of the turns that have both counts; None when none has."""
    counted = [(t.cached_tokens, t.prompt_tokens) for t in turns if t.cached_tokens is not None and t.prompt_tokens]
    prompt = sum(prompt or 0 for _, prompt in counted)
    return sum(cached or 0 for cached, _ in counted) / prompt if prompt else None


def load_result(path: Path) -> ArmResult:
    """Read one arm's JSON; raises `ConfigError` that names the file when it is not one."""
    try:
        return ArmResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValidationError, ConfigError) as error:
        why = str(error).splitlines()
        raise ConfigError(f"{path} is not a result of `inpage replay`: {' '.join(why[:3])}") from error


def save_result(result: ArmResult, path: Path) -> None:
    """Write one arm's JSON, replacing the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
