"""Who chooses the in-page worker on Gaudi, when, and what is refused with one sentence."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from scheduler_double import make_scheduler

from inpage.engines import activation, contract, plugin
from inpage.errors import ConfigError, ContractError

DOUBLE = Path(__file__).parent / "double"
HPU_WORKER = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
EXAMPLE_CONNECTOR = SimpleNamespace(kv_connector="NixlConnector")


@pytest.fixture
def config(model):
    """A configuration that in-page covers, as it reaches the platform."""
    config = make_scheduler(model, num_blocks=40).vllm_config
    config.parallel_config.worker_cls = "auto"
    return config


@pytest.fixture
def platform(installed_double, monkeypatch):
    """The double's platform class, and the sources taken as verified."""
    monkeypatch.setattr(contract, "verify", lambda package, symbols: None)
    from inpage.engines import scheduler

    monkeypatch.setattr(scheduler, "install", lambda: None)
    return importlib.import_module("vllm_gaudi.platform").HpuPlatform


def worker_of(platform, config) -> str:
    platform.check_and_update_config(config)
    return config.parallel_config.worker_cls


def test_the_double_offers_everything_the_contract_names():
    findings = contract.check(DOUBLE / "vllm_gaudi", contract.GAUDI_WORKER, known={})
    assert [str(finding.symbol) for finding in findings if finding.missing] == []


def test_compact_gdn_and_prefix_caching_together_choose_the_in_page_worker(platform, config, monkeypatch):
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    plugin.register()
    assert worker_of(platform, config) == activation.GAUDI_WORKER
    assert worker_of(platform, config) == activation.GAUDI_WORKER  # EngineCore runs it a second time


@pytest.mark.parametrize("environment", [{}, {"VLLM_COMPACT_GDN": "0"}, {"VLLM_COMPACT_GDN": "1", "INPAGE": "0"}])
def test_what_nobody_asked_for_leaves_the_platform_as_it_is(platform, config, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    original = platform.check_and_update_config.__func__
    plugin.register()
    assert platform.check_and_update_config.__func__ is original
    assert worker_of(platform, config) == HPU_WORKER


def test_without_prefix_caching_the_worker_stays(platform, config, monkeypatch):
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    config.cache_config.enable_prefix_caching = False
    plugin.register()
    assert worker_of(platform, config) == HPU_WORKER


def test_several_models_get_the_in_page_worker_from_the_start(platform, config, monkeypatch):
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    monkeypatch.setenv("VLLM_HPU_MULTI_MODEL_CONFIG", "models.yaml")
    config.cache_config.enable_prefix_caching = False
    plugin.register()
    assert worker_of(platform, config) == activation.GAUDI_WORKER


def test_decode_padding_alone_chooses_its_own_worker(platform, config, monkeypatch):
    monkeypatch.setenv("INPAGE_HYBRID_DECODE_PAD", "1")
    config.cache_config.enable_prefix_caching = False
    plugin.register()
    assert worker_of(platform, config) == activation.DECODE_PAD_WORKER


def test_the_entry_point_of_decode_padding_needs_no_switch(platform, config):
    plugin.register_decode_pad()
    assert worker_of(platform, config) == activation.DECODE_PAD_WORKER


@pytest.mark.parametrize("order", [("register", "register_decode_pad"), ("register_decode_pad", "register")])
def test_both_entry_points_choose_the_in_page_worker_in_any_order(platform, config, monkeypatch, order):
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    for name in order:
        getattr(plugin, name)()
    assert worker_of(platform, config) == activation.GAUDI_WORKER


def test_retention_becomes_dense_where_vllms_default_keeps_little(platform, config, monkeypatch):
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    plugin.register()
    for given, expected in ((0, None), (4096, 4096), (None, None)):
        config.cache_config.prefix_cache_retention_interval = given
        platform.check_and_update_config(config)
        assert config.cache_config.prefix_cache_retention_interval == expected


def test_inpage_1_is_not_how_one_asks_on_gaudi(installed_double, monkeypatch):
    monkeypatch.setenv("INPAGE", "1")
    with pytest.raises(ConfigError, match="set VLLM_COMPACT_GDN=1 instead"):
        plugin.register()


REFUSED = {
    "contiguous PA": ({"VLLM_CONTIGUOUS_PA": "1"}, {}, "makes vllm-gaudi turn prefix caching off: set VLLM_"),
    "defragmenter": ({"VLLM_DEFRAG": "true"}, {}, "VLLM_DEFRAG=1 moves pages to other blocks"),
    "no hybrid cache": ({"VLLM_USE_HYBRID_CACHE": "0"}, {}, "VLLM_USE_HYBRID_CACHE=0 takes the slots away"),
    "naive sharing": ({"VLLM_USE_NAIVE_MAMBA_CACHE_SHARING": "1"}, {}, "lays attention out in whole blocks"),
    "connector": (
        {},
        {"kv_transfer_config": EXAMPLE_CONNECTOR},
        "KV connectors (--kv-transfer-config) are not",
    ),
    "speculation": (
        {},
        {"speculative_config": SimpleNamespace()},
        "speculative decoding (--speculative-config) is not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_with_one_sentence(platform, config, monkeypatch, name):
    environment, attributes, sentence = REFUSED[name]
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    for attribute, value in attributes.items():
        monkeypatch.setattr(config, attribute, value)
    plugin.register()
    with pytest.raises(ConfigError) as refusal:
        platform.check_and_update_config(config)
    assert sentence in str(refusal.value)
    assert str(refusal.value).endswith("serve without VLLM_COMPACT_GDN=1.")


def test_another_worker_class_is_refused(platform, config, monkeypatch):
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    config.parallel_config.worker_cls = "my.Worker"
    plugin.register()
    with pytest.raises(ConfigError, match=r"--worker-cls my\.Worker replaces the worker"):
        platform.check_and_update_config(config)


@pytest.fixture
def unverified(installed_double, monkeypatch):
    """The double's platform class, its sources unknown."""
    monkeypatch.delenv("INPAGE_ACCEPT_UNVERIFIED", raising=False)
    monkeypatch.setenv("VLLM_COMPACT_GDN", "1")
    from inpage.engines import scheduler

    monkeypatch.setattr(scheduler, "install", lambda: None)
    plugin.register()
    return importlib.import_module("vllm_gaudi.platform").HpuPlatform


def test_sources_nobody_verified_are_refused_and_named(unverified, config):
    with pytest.raises(ContractError, match=r"HPUModelRunner\.sample_tokens \(source [0-9a-f]{16}\)"):
        unverified.check_and_update_config(config)


def test_sources_nobody_verified_matter_to_nobody_who_did_not_ask(unverified, config):
    config.cache_config.enable_prefix_caching = False
    assert worker_of(unverified, config) == HPU_WORKER


def test_sources_nobody_verified_pass_when_the_user_says_so(unverified, config, monkeypatch):
    monkeypatch.setenv("INPAGE_ACCEPT_UNVERIFIED", "1")
    assert worker_of(unverified, config) == activation.GAUDI_WORKER
