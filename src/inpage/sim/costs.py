"""What a step takes: a cost model of two rates, given or fitted to a replay report.

    seconds of a step = prefill tokens / prefill rate + (1 / decode rate, when anything is decoded)

Decoding streams share a step, so that a batch costs what one stream costs; prefill chunks hold them up. The
default rates are those of a 27B model on one Gaudi 2: 260K tokens cold in 247 s, 18 tokens a second and stream.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from inpage.errors import ConfigError
from inpage.replay.result import load_result


@dataclass(frozen=True)
class Costs:
    """Tokens per second: of prefill, and of decoding in each stream."""

    prefill_rate: float = 1053.0
    decode_rate: float = 18.0

    def __post_init__(self) -> None:
        if min(self.prefill_rate, self.decode_rate) <= 0:
            raise ConfigError("the prefill and decode rates must be above zero tokens a second")

    def seconds(self, prefill_tokens: int, decodes: bool) -> float:
        """Of one step."""
        return prefill_tokens / self.prefill_rate + (1 / self.decode_rate if decodes else 0.0)


def fitted(report: Path) -> Costs:
    """Rates of one arm of a replay: prompt tokens that were not cached over TTFT, and the decode rates' median.

    TTFT contains waiting, so that a replay whose sessions run one at a time fits best. Raises `ConfigError`
    when the arm has no such figures.
    """
    turns = [turn for turn in load_result(report).turns if turn.error is None]
    computed = seconds = 0.0
    for turn in turns:
        if turn.prompt_tokens and turn.ttft_s:
            computed += turn.prompt_tokens - (turn.cached_tokens or 0)
            seconds += turn.ttft_s
    decode = [turn.decode_tok_s for turn in turns if turn.decode_tok_s]
    if computed <= 0 or not decode:
        raise ConfigError(f"{report} has no turns with prompt tokens, TTFT and decode rate to fit the rates to")
    return Costs(computed / seconds, statistics.median(decode))
