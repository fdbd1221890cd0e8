"""The lines of counters in a server's log."""

from __future__ import annotations

import logging

from inpage.engines.activation import StatsLog


def test_a_line_comes_when_it_is_due_and_says_something_new(caplog) -> None:
    log = StatsLog(logging.getLogger("test"), "worker", seconds=0.0)
    with caplog.at_level(logging.INFO):
        for line in ("saves 1", "saves 1", "saves 2"):
            log.log(lambda line=line: line)
    assert caplog.messages == ["inpage worker: saves 1", "inpage worker: saves 2"]


def test_a_line_that_is_not_due_is_not_even_made(caplog) -> None:
    log = StatsLog(logging.getLogger("test"), "worker", seconds=3600.0)
    with caplog.at_level(logging.INFO):
        log.log(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert caplog.messages == []


def test_the_last_line_comes_even_when_nothing_has_changed_and_comes_once(caplog) -> None:
    """A stop right after a line that was due must not leave the log without its last one."""
    log = StatsLog(logging.getLogger("test"), "worker", seconds=0.0)
    with caplog.at_level(logging.INFO):
        log.log(lambda: "saves 1")
        for _ in range(2):
            log.log(lambda: "saves 1", at_shutdown=True)
    assert caplog.messages == ["inpage worker: saves 1", "inpage worker, at shutdown: saves 1"]
