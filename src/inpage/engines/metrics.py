"""inpage's counters on the server's own `/metrics`, on the way that vLLM's numbers take.

    worker (rank 0)            EngineCore                       API server
    counters, a snapshot  ->   the scheduler's statistics   ->  `MetricsLogger`, prometheus_client
    on `ModelRunnerOutput`     (`SchedulerStats`)               vLLM's `/metrics`

No port, file or thread of its own, so it works wherever vLLM's metrics do: one process or many, tensor and data
parallel, several API servers. A snapshot is taken once a second while the worker is busy, and in the step without
tokens in which vLLM tells it of the last finished requests; so an idle server's numbers are exact.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from copy import copy
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerManager
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from inpage.engines.activation import why_not
from inpage.metrics.catalogue import METRICS, Metric
from inpage.metrics.snapshot import Changes, Snapshot, of_worker
from inpage.state.mover import Mover

SECONDS_BETWEEN = 1.0
ATTRIBUTE = "inpage"
PREFIX = "inpage:"
"""Of our keys in `SchedulerStats.waiting_lora_adapters`. It is the one field that takes integers under any name and
that every front end passes over without LoRA; `kv_connector_stats` raises in loggers that know no connector."""


# ---------------------------------------------------------------------------------------------------------- worker
class _CarryingLater(AsyncModelRunnerOutput):
    """An output that is still being made, and the snapshot it will carry."""

    def __init__(self, output: AsyncModelRunnerOutput, snapshot: Snapshot) -> None:
        self._output = output
        self._snapshot = snapshot

    def get_output(self) -> Any:
        return _carrying(self._output.get_output(), self._snapshot)


def _carrying(output: Any, snapshot: Snapshot) -> Any:
    if isinstance(output, AsyncModelRunnerOutput):
        return _CarryingLater(output, snapshot)
    if isinstance(output, ModelRunnerOutput):
        output = copy(output)  # vLLM shares one empty output among all empty steps
        setattr(output, ATTRIBUTE, snapshot)
    return output


class WorkerReport:
    """Puts snapshots on a worker's outputs; only rank 0's outputs reach EngineCore."""

    def __init__(self, seconds: float = SECONDS_BETWEEN) -> None:
        self._seconds = seconds
        self._next = 0.0

    def on(self, output: Any, mover: Mover | None, idle: bool = False) -> Any:
        """The output, carrying a snapshot when one is due or the step was idle; other values pass unchanged."""
        if mover is None or output is None:
            return output
        now = time.monotonic()
        if not idle and now < self._next:
            return output
        self._next = now + self._seconds
        return _carrying(output, of_worker(mover))


# ------------------------------------------------------------------------------------------------------ EngineCore
class SchedulerReport:
    """Puts what the worker and the scheduler side have added since last time on the scheduler's statistics."""

    def __init__(self) -> None:
        self._changes = Changes()
        self._snapshot: Snapshot | None = None

    def receive(self, output: Any) -> None:
        """Keep the snapshot that a worker's output carries, if any."""
        snapshot = getattr(output, ATTRIBUTE, None)
        if snapshot is not None:
            self._snapshot = snapshot

    def add_to(self, stats: Any, counters: Mapping[str, int]) -> None:
        """Add to the statistics of a step, None with --disable-log-stats; `counters` are the scheduler side's."""
        if stats is None or self._snapshot is None:
            return
        for field, value in self._changes.since_last({**self._snapshot, **counters}).items():
            stats.waiting_lora_adapters[PREFIX + field] = value
        self._snapshot = None


# ------------------------------------------------------------------------------------------------------ API server
_registered: list[Counter | Gauge] = []


class MetricsLogger(StatLoggerBase):
    """A vLLM stat logger that takes inpage's numbers off the statistics and shows them on `/metrics`."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        # A second engine in one process starts anew, as vLLM's own metrics do.
        while _registered:
            REGISTRY.unregister(_registered.pop())
        self._model_name = str(vllm_config.model_config.served_model_name)
        self._collectors = [(metric, self._collector(metric)) for metric in METRICS]
        for metric, collector in self._collectors:
            _registered.append(collector)
            if metric.kind == "counter":  # visible from the start, so that rates see the first increase
                for index in engine_indexes:
                    for value in metric.fields:
                        collector.labels(*self._labels(metric, index, value))

    @staticmethod
    def _collector(metric: Metric) -> Counter | Gauge:
        names = ["model_name", "engine", *([metric.label] if metric.label else [])]
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, names)
        return Gauge(metric.name, metric.help, names, multiprocess_mode="mostrecent")

    def _labels(self, metric: Metric, engine: int, value: str) -> list[str]:
        return [self._model_name, str(engine), *([value] if metric.label else [])]

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM for each step's statistics; usually finds nothing."""
        if scheduler_stats is None or not scheduler_stats.waiting_lora_adapters:
            return
        carrier = scheduler_stats.waiting_lora_adapters
        added = {key: carrier.pop(key) for key in list(carrier) if key.startswith(PREFIX)}
        for metric, collector in self._collectors:
            for value, field in metric.fields.items():
                amount = added.get(PREFIX + field)
                if amount is None:
                    continue
                child = collector.labels(*self._labels(metric, engine_idx, value))
                if isinstance(child, Counter):
                    child.inc(amount * metric.unit)
                else:
                    child.set(amount * metric.unit)

    def log_engine_initialized(self) -> None:
        """Nothing to say; the worker's line at start says it."""


def install() -> None:
    """Have every front end that is built for an in-page configuration show the metrics."""
    original = StatLoggerManager.__init__
    if getattr(original, "inpage", False):
        return

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if why_not(vllm_config) is None:
            # First, so that the others find the statistics as vLLM made them.
            self.stat_loggers.insert(0, MetricsLogger(vllm_config, self.engine_indexes))

    init.inpage = True  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = init
