"""Run the sessions of one arm against a server, all at once, each one turn after turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime

from inpage import __version__
from inpage.errors import ConfigError, ServerError
from inpage.replay.client import SESSION_HEADER, Served, Server
from inpage.replay.result import ArmResult, TurnRecord
from inpage.replay.sessions import DECOY_TOOLS, SessionSpec, Transcripts, build, calibrate

OnTurn = Callable[[TurnRecord], None]


class ReplayInterrupted(KeyboardInterrupt):
    """Ctrl-C during the measurement; `result` holds the turns that were measured until then."""

    def __init__(self, result: ArmResult) -> None:
        super().__init__("interrupted")
        self.result = result


async def run_replay(
    base_url: str,
    spec: SessionSpec,
    *,
    arm: str,
    model: str | None = None,
    on_turn: OnTurn | None = None,
    plain: bool = False,
    warmup: bool = True,
    timeout_s: float = 600.0,
    api_key: str | None = None,
    session_header: str = SESSION_HEADER,
) -> ArmResult:
    """Replay `spec` and return what was measured; a failed turn is recorded and ends its session.

    `on_turn` is called in the event loop after every turn. `plain` sends nothing that only vLLM knows (then
    a model may stop before `output_tokens`). `timeout_s` is the longest silence of the server in seconds.
    `session_header` tells a router which session a request is of: the same for the same transcripts.
    Raises, before anything is measured, `ConfigError` for sizes that do not fit and `ServerError` when no
    server answers as it must.
    """
    run = _Run(spec, arm, on_turn, plain, warmup)
    server = Server(base_url, plain=plain, timeout_s=timeout_s, api_key=api_key, session_header=session_header)
    return await run.go(server, model)


def replay_arm(
    base_url: str,
    spec: SessionSpec,
    *,
    arm: str,
    model: str | None = None,
    on_turn: OnTurn | None = None,
    plain: bool = False,
    warmup: bool = True,
    timeout_s: float = 600.0,
    api_key: str | None = None,
    session_header: str = SESSION_HEADER,
) -> ArmResult:
    """`run_replay` without a running event loop; Ctrl-C raises `ReplayInterrupted` with what there is."""
    run = _Run(spec, arm, on_turn, plain, warmup)
    server = Server(base_url, plain=plain, timeout_s=timeout_s, api_key=api_key, session_header=session_header)
    try:
        return asyncio.run(run.go(server, model))
    except KeyboardInterrupt:
        if run.started is None:
            raise
        raise ReplayInterrupted(run.result("interrupted")) from None


class _Run:
    """One arm while it runs; the records are kept here so that an interruption does not lose them."""

    def __init__(self, spec: SessionSpec, arm: str, on_turn: OnTurn | None, plain: bool, warmup: bool) -> None:
        self.spec, self.arm, self.on_turn = spec, arm, on_turn
        self.plain, self.warmup = plain, warmup
        self.records: list[TurnRecord] = []
        self.started: tuple[float, str] | None = None

    async def go(self, server: Server, model: str | None) -> ArmResult:
        async with server:
            self.url = server.url
            self.served = await server.identify(model)
            _check_length(self.spec, self.served)
            cost = await calibrate(self.spec, server.count)
            self.transcripts = build(self.spec, cost)
            if self.warmup:
                await _warm_up(server, build(_warmup_spec(self.spec), cost, tools=DECOY_TOOLS, salt="warm-up"))
            self.digest = self.transcripts.digest
            self.started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
            sessions = [asyncio.create_task(self._session(server, n)) for n in range(self.spec.sessions)]
            try:
                await asyncio.gather(*sessions)
            finally:
                for session in sessions:
                    session.cancel()
                await asyncio.gather(*sessions, return_exceptions=True)
            return self.result()

    async def _session(self, server: Server, session: int) -> None:
        for turn in range(1, self.spec.turns + 1):
            messages = self.transcripts.messages(session, turn)
            name = f"{self.digest[:12]}-{session}"
            answer = await server.stream(messages, self.transcripts.tools, self.spec.output_tokens, name)
            record = TurnRecord(session=session, turn=turn, **asdict(answer))
            self.records.append(record)
            if self.on_turn is not None:
                self.on_turn(record)
            if record.error is not None:
                return

    def result(self, *notes: str) -> ArmResult:
        assert self.started is not None
        start, started_at = self.started
        return ArmResult(
            arm=self.arm,
            model=self.served.model,
            base_url=self.url,
            settings=self.spec,
            transcript_digest=self.digest,
            started_at=started_at,
            wall_s=time.perf_counter() - start,
            turns=sorted(self.records, key=lambda record: (record.session, record.turn)),
            note="; ".join([*notes, *_warm_start(self.spec, self.records)]),
            plain=self.plain,
            warmup=self.warmup,
            max_model_len=self.served.max_model_len,
            server_version=self.served.version,
            inpage_version=__version__,
        )


def _check_length(spec: SessionSpec, served: Served) -> None:
    longest = spec.prompt_tokens(spec.turns) + spec.output_tokens
    if served.max_model_len is not None and longest > served.max_model_len:
        raise ConfigError(
            f"turn {spec.turns} needs {spec.prompt_tokens(spec.turns)} prompt and {spec.output_tokens} output "
            f"tokens, the server's max_model_len is {served.max_model_len}: lower --end-tokens to at most "
            f"{served.max_model_len - spec.output_tokens}, or serve with a larger --max-model-len"
        )


def _warmup_spec(spec: SessionSpec) -> SessionSpec:
    """One session of at most two turns: a cold prompt of the first size, and one that can hit."""
    return replace(spec, sessions=1, end_tokens=spec.prompt_tokens(min(2, spec.turns)))


async def _warm_up(server: Server, transcripts: Transcripts) -> None:
    for turn in range(1, transcripts.spec.turns + 1):
        messages = transcripts.messages(0, turn)
        answer = await server.stream(messages, transcripts.tools, transcripts.spec.output_tokens)
        if answer.error is not None:
            raise ServerError(f"the warm-up failed at turn {turn}: {answer.error}")


def _warm_start(spec: SessionSpec, records: list[TurnRecord]) -> list[str]:
    """Say so when first turns hit on more than the shared part, which a fresh server cannot."""
    first = max((r.cached_tokens or 0 for r in records if r.turn == 1), default=0)
    if first <= (spec.system_tokens + spec.start_tokens) / 2:
        return []
    return [
        f"a first turn had {first} tokens cached where the sessions share {spec.system_tokens}: the server "
        "had seen these transcripts; restart it or take another --seed"
    ]
