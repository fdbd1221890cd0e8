"""What a recipe file says. Unknown keys are refused, so that a misspelt one does not pass for a missing one."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inpage.layout.units import parse_memory

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Flag(_Strict):
    """A flag of the serve command; `value` is None for a switch. `why` is the reason it is there."""

    flag: Annotated[str, Field(pattern=r"^--[a-z0-9-]+$")]
    value: str | int | float | None = None
    why: Text

    @property
    def words(self) -> list[str]:
        """The flag as words of a command line."""
        return [self.flag] if self.value is None else [self.flag, str(self.value)]


class Variable(_Strict):
    """An environment variable of the server."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    value: str
    why: Text


class Step(_Strict):
    """A command to run before the server starts."""

    run: Text
    why: Text


class Geometry(_Strict):
    """The keys of the model's config.json that decide block and pool, and where they were read."""

    config: dict[str, Any]
    source: Text


class Pool(_Strict):
    """Memory of the pool on one rank, like 18475MiB; `basis` says whether it was measured, derived or assumed."""

    memory: str
    basis: Literal["derived", "assumed", "set"]
    why: Text

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes; raises `ConfigError` for what is not a size."""
        return parse_memory(self.memory)


class Expected(_Strict):
    """Figures that `inpage plan` gives for one rank; `inpage recipe NAME --check` compares them.

    sessions_64k: sessions of 65,536 tokens (or max-model-len, if less) that stay cached while they take turns.
    """

    block_tokens: int
    state_bytes: int
    page_bytes: int
    block_bytes: int
    num_blocks: int
    printed_tokens: int
    sessions_64k: int
    slots: int
    slot_bytes: int


class Measured(_Strict):
    """One measured figure; only what was run goes here, with the command that gave it."""

    what: Text
    value: Text
    command: Text
    machine: Text


class Profile(_Strict):
    """One release to serve it with: how inpage gets there, and what is set or added for it."""

    vllm: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    install: list[Step] = []
    environment: list[Variable] = []
    flags: list[Flag] = []
    notes: list[Text] = []
    measured: list[Measured] = []


class Recipe(_Strict):
    """A model on a kind of machine.

    `model` is what vLLM is given. A recipe whose `made` is not None serves the demo's model with these sizes
    instead, written where `inpage recipe NAME --run` finds none. Gates are arguments of `inpage gate`.
    """

    name: str
    title: Text
    device: Literal["gaudi2", "cpu"]
    cards: Annotated[int, Field(ge=1)] = 1
    model: str | None = None
    made: dict[str, int] | None = None
    geometry: Geometry | None = None
    pool: Pool
    flags: list[Flag]
    profiles: Annotated[dict[str, Profile], Field(min_length=1)]
    expected: Expected
    gates: Annotated[list[Step], Field(min_length=1)]
    notes: list[Text] = []

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if NAME.fullmatch(self.name) is None:
            raise ValueError(f"name {self.name!r}: small letters, digits, '.' and '-' only")
        if (self.model is None) == (self.made is None):
            raise ValueError("give either model, which vLLM fetches, or made, the sizes of a model made here")
        if (self.model is None) != (self.geometry is None):
            raise ValueError("geometry belongs to model: the config of a model that is made follows from its sizes")
        for name, profile in self.profiles.items():
            flags = [flag.flag for flag in [*self.flags, *profile.flags]]
            if twice := sorted({flag for flag in flags if flags.count(flag) > 1}):
                raise ValueError(f"profile {name} gives {', '.join(twice)} twice")
        return self

    def value(self, flag: str) -> str | int | float | None:
        """The value of a flag that every profile shares, None when it is not given."""
        return next((each.value for each in self.flags if each.flag == flag), None)
