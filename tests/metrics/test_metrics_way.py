"""The way of the numbers from the worker to `/metrics`, with vLLM's own classes and its wire format."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from test_metrics_snapshot import mover
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from inpage.engines import metrics
from inpage.engines.metrics import PREFIX, MetricsLogger, SchedulerReport, WorkerReport
from inpage.metrics.catalogue import METRICS
from inpage.metrics.snapshot import of_worker

CONFIG = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
SIDE = {"refused_unwritten": 3, "deferred": 2, "below_block": 1, "evicted_before_hit": 6, "evicted_after_hit": 9}


def output() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})


def sample(name: str, engine: str = "0", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def over_the_wire(stats: SchedulerStats) -> SchedulerStats:
    """As EngineCore encodes and an API server decodes it."""
    frames = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return MsgpackDecoder(EngineCoreOutputs).decode(frames).scheduler_stats


def test_a_snapshot_goes_on_an_output_when_due_and_when_idle_but_not_on_every_step():
    worker, report = mover(), WorkerReport(seconds=3600)
    first = report.on(output(), worker)
    assert first.inpage == of_worker(worker)
    assert not hasattr(report.on(output(), worker), "inpage")
    assert report.on(output(), worker, idle=True).inpage == of_worker(worker)
    assert pickle.loads(pickle.dumps(first)).inpage == first.inpage  # as a worker process sends it


def test_vllms_shared_empty_output_is_not_written_to():
    carrying = WorkerReport().on(EMPTY_MODEL_RUNNER_OUTPUT, mover(), idle=True)
    assert carrying.inpage["slots"] == 3
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "inpage")


def test_an_output_of_asynchronous_scheduling_carries_it_once_it_is_there():
    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return output()

    carrying = WorkerReport().on(Later(), mover())
    assert isinstance(carrying, AsyncModelRunnerOutput)
    assert carrying.get_output().req_ids == ["a"]
    assert carrying.get_output().inpage["slots"] == 3


@pytest.mark.parametrize("other", [None, {"a": 1.0}])
def test_what_is_no_output_passes_unchanged(other):
    assert WorkerReport().on(other, mover()) is other


def test_numbers_arrive_as_they_were_counted_whichever_steps_carry_them():
    worker, worker_report, scheduler_report = mover(), WorkerReport(seconds=0), SchedulerReport()
    logger = MetricsLogger(CONFIG, [0])
    worker.counters.saves, worker.counters.seconds = 4, 0.25
    for saves in (4, 9, 9):
        worker.counters.saves = saves
        scheduler_report.receive(worker_report.on(output(), worker))
        stats = SchedulerStats()
        scheduler_report.add_to(stats, SIDE)
        logger.record(over_the_wire(stats), None)
    assert sample("inpage_saves_total") == 9
    assert sample("inpage_copy_seconds_total") == pytest.approx(0.25)
    assert sample("inpage_refused_hits_total", reason="never_written") == 3
    assert sample("inpage_deferred_requests_total") == 2
    assert sample("inpage_short_prompts_total") == 1
    evicted = [sample("inpage_evicted_checkpoint_blocks_total", when=when) for when in ("before_hit", "after_hit")]
    assert evicted == [6, 9]
    assert sample("inpage_slots") == 3
    assert sample("inpage_pages", owner="none") == 9


def test_two_engines_are_told_apart():
    logger = MetricsLogger(CONFIG, [0, 1])
    for engine in (0, 1):
        stats = SchedulerStats(waiting_lora_adapters={f"{PREFIX}saves": engine + 1})
        logger.record(stats, None, engine_idx=engine)
    assert [sample("inpage_saves_total", engine=e) for e in "01"] == [1, 2]


def test_counters_are_there_from_the_start_and_levels_once_they_are_known():
    MetricsLogger(CONFIG, [0])
    MetricsLogger(CONFIG, [0])  # another engine in the same process
    for metric in METRICS:
        for value in metric.fields:
            labels = {metric.label: value} if metric.label else {}
            assert sample(metric.exposed_name, **labels) == (0 if metric.kind == "counter" else None)


def test_statistics_without_a_worker_s_snapshot_stay_as_vllm_made_them():
    report, stats = SchedulerReport(), SchedulerStats()
    report.receive(output())
    report.add_to(stats, SIDE)
    report.add_to(None, SIDE)  # --disable-log-stats
    assert stats == SchedulerStats()


def test_a_front_end_without_inpage_passes_over_the_numbers():
    logger = LoggingStatLogger(VllmConfig(device_config=DeviceConfig("cpu")))
    logger.record(over_the_wire(SchedulerStats(waiting_lora_adapters={f"{PREFIX}saves": 1})), None)
    assert logger.last_scheduler_stats.waiting_lora_adapters == {f"{PREFIX}saves": 1}


def test_the_others_find_the_statistics_as_vllm_made_them():
    """A LoRA adapter's own entry stays; inpage's logger comes first and takes its own."""
    logger = MetricsLogger(CONFIG, [0])
    stats = SchedulerStats(waiting_lora_adapters={f"{PREFIX}saves": 1, "adapter": 2})
    logger.record(stats, None)
    assert stats.waiting_lora_adapters == {"adapter": 2}


@pytest.mark.parametrize("covered", [True, False])
def test_only_a_covered_configuration_gets_the_logger_and_it_comes_first(monkeypatch, covered):
    monkeypatch.setattr(metrics, "why_not", lambda config: None if covered else "not a hybrid")

    def init(self, vllm_config, engine_idxs=None):
        self.engine_indexes, self.stat_loggers = engine_idxs or [0], ["vllm's"]

    monkeypatch.setattr(StatLoggerManager, "__init__", init)
    metrics.install()
    metrics.install()  # a plugin may be loaded twice
    loggers = StatLoggerManager(CONFIG, [0]).stat_loggers
    assert [type(logger) for logger in loggers] == ([MetricsLogger, str] if covered else [str])


API_SERVERS = """
import os
from types import SimpleNamespace
from vllm.v1.metrics.stats import SchedulerStats
from inpage.engines.metrics import PREFIX, MetricsLogger

def told(saves, held):
    logger = MetricsLogger(SimpleNamespace(model_config=SimpleNamespace(served_model_name="m")), [0])
    logger.record(SchedulerStats(waiting_lora_adapters={PREFIX + "saves": saves, PREFIX + "slots_held": held}), None)

if child := os.fork():
    os.waitpid(child, 0)
    told(3, 1)
else:
    told(2, 4)
    os._exit(0)
"""


def test_what_several_api_servers_were_told_adds_up(tmp_path):
    """vLLM sets this directory for more than one API server; each of them then shows the numbers of all."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", API_SERVERS], check=True, env=environment)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("inpage_saves_total", labels) == 5
    assert registry.get_sample_value("inpage_slots_in_use", labels) == 1
