"""What the doctor finds: a topic, a level, plain words, and what to change."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Level(StrEnum):
    """`wrong` makes the exit status 1; `advice` is worth a change, nothing is wrong without it."""

    OK = "ok"
    INFO = "info"
    ADVICE = "advice"
    WRONG = "wrong"


class Finding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True)

    topic: str
    level: Level
    text: str = Field(description="What is the case, in one or two sentences.")
    change: str | None = Field(default=None, description="The flag, variable or command that changes it.")


def ok(topic: str, text: str) -> Finding:
    """As it should be."""
    return Finding(topic=topic, level=Level.OK, text=text)


def info(topic: str, text: str) -> Finding:
    """Good to know."""
    return Finding(topic=topic, level=Level.INFO, text=text)


def advice(topic: str, text: str, change: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(topic=topic, level=Level.ADVICE, text=text, change=change)


def wrong(topic: str, text: str, change: str) -> Finding:
    """It does not work, or serves wrong answers."""
    return Finding(topic=topic, level=Level.WRONG, text=text, change=change)
