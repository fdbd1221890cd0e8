"""The pool that `inpage serve` chooses on machines that are made up, and what it refuses there in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inpage.demo.model import make_model
from inpage.errors import ConfigError
from inpage.serve.command import build
from inpage.serve.machine import Machine

GIB = 2**30
PAGE = 256 * 128
"""A block of the demo's model: 256 tokens of 128 bytes in its one attention layer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with 12 GiB of weights that take no room on the disk."""
    folder = make_model(tmp_path_factory.mktemp("heavy"))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [6, GIB], "data_offsets": [0, 12 * GIB]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 12 * GIB)
    return folder


def launch(model: Path, *arguments: str, layout: str = "in-page", **machine):
    facts = {"total": 24 * GIB, "available": 15 * GIB, "variables": {}, **machine}
    return build(str(model), list(arguments), layout, Machine(**facts))


def value(launch, flag: str) -> str | None:
    command = list(launch.command)
    return command[command.index(flag) + 1] if flag in command else None


def test_a_small_model_gets_eight_conversations_for_each_sequence_and_no_more(model):
    for share in (0.9, 0.6, 0.3):
        one = launch(model, available=int(share * 24 * GIB))
        assert value(one, "--kv-cache-memory-bytes") == str((64 * 262 + 1) * PAGE)
        assert value(one, "--max-model-len") is None
        assert "4,194,554 tokens, 64 whole conversations of 65,536 tokens, chosen; another size: --kv" in one.notes[0]


def test_a_pool_below_that_is_four_fifths_of_what_weights_and_engine_leave(heavy):
    # 0.5 GiB are left less 9 slots of 3 states of 17,536 bytes; four fifths of them, in whole blocks.
    one = launch(heavy, available=14 * GIB + GIB // 2)
    expected = (GIB // 2 - 9 * 3 * 17536) * 4 // 5
    assert value(one, "--kv-cache-memory-bytes") == str(expected - expected % PAGE)
    (reason,) = [reason for flag, reason in one.added if flag.startswith("--kv-cache")]
    assert "14.50 GiB of 24.00 GiB are free; weights take 12.00 GiB, the engine 2.00 GiB" in reason


def test_a_pool_that_holds_no_request_of_the_models_length_gets_a_shorter_length(heavy):
    one = launch(heavy, available=14 * GIB + 6 * 2**20)
    # 6 MiB less the slots, four fifths: 142 blocks, of which one is null and six are for states.
    assert value(one, "--max-model-len") == str(135 * 256)
    assert "1 whole conversation of 34,560 tokens, chosen" in one.notes[0]


def test_where_nothing_fits_one_line_has_the_numbers(heavy):
    with pytest.raises(ConfigError) as refused:
        launch(heavy, available=13 * GIB)
    text = str(refused.value)
    assert "no pool fits: 13.00 GiB of 24.00 GiB are free; weights take 12.00 GiB, the engine 2.00 GiB" in text
    assert "one request of 2,048 tokens needs 0.47 MiB: free some memory" in text
    assert "\n" not in text


def test_in_a_cgroup_that_counts_files_loading_takes_the_weights_twice(heavy):
    assert launch(heavy, available=16 * GIB)
    with pytest.raises(ConfigError, match=r"weights take 24\.00 GiB"):
        launch(heavy, available=16 * GIB, counts_files=True)


def test_ranks_share_the_machine_and_each_has_its_node():
    machine = Machine(64 * GIB, 60 * GIB, nodes=(20 * GIB, 30 * GIB))
    assert [machine.available_to(ranks) // GIB for ranks in (1, 2, 4)] == [20, 40, 40]
    assert Machine(64 * GIB, 60 * GIB).available_to(4) == 60 * GIB


@pytest.mark.parametrize(
    ("arguments", "variables", "by"),
    [
        (["--gpu-memory-utilization", "0.25"], {}, "at most 6.00 GiB"),
        (["--kv-cache-memory-bytes", "2g"], {}, "by --kv-cache-memory-bytes 2g"),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "3"}, "by VLLM_CPU_KVCACHE_SPACE=3"),
        (["--num-gpu-blocks-override=500"], {"VLLM_CPU_KVCACHE_SPACE": "1"}, "by --num-gpu-blocks-override 500"),
    ],
)
def test_what_the_user_says_of_memory_wins(model, arguments, variables, by):
    one = launch(model, *arguments, variables=variables)
    assert not [flag for flag, _ in one.added if "memory" in flag or "blocks" in flag]
    assert by in one.notes[0]


def test_blocks_alone_would_still_make_vllm_ask_for_most_of_the_memory(model):
    assert value(launch(model, "--num-gpu-blocks-override", "500"), "--kv-cache-memory-bytes") == str(500 * PAGE)


def test_a_file_of_flags_counts_as_said(model, tmp_path):
    (tmp_path / "flags.yaml").write_text("gpu-memory-utilization: 0.25\nmax_num_seqs: 2\n")
    one = launch(model, "--config", str(tmp_path / "flags.yaml"))
    assert not [flag for flag, _ in one.added if "memory" in flag or "max-num-seqs" in flag]


def test_per_block_is_cut_from_the_pool_that_was_chosen(model):
    one = launch(model, layout="per-block")
    assert value(one, "--kv-cache-memory-bytes") == str((64 * 262 + 1) * PAGE * PAGE // (PAGE + 17536))


def test_of_a_model_on_the_hub_nothing_is_known_and_vllm_takes_what_weights_leave_of_a_share(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    one = launch(Path("nobody/has-this"))
    assert value(one, "--gpu-memory-utilization") == "0.46"
    assert value(one, "--max-model-len") == "auto"
    with pytest.raises(ConfigError, match=r"no pool fits: 2\.00 GiB of 24\.00 GiB are free"):
        launch(Path("nobody/has-this"), available=2 * GIB)


def test_random_weights_are_of_unknown_size(model, tmp_path):
    folder = make_model(tmp_path)
    (folder / "model.safetensors").unlink()
    assert value(launch(folder, "--load-format", "dummy"), "--gpu-memory-utilization") == "0.46"


def test_without_a_machine_nothing_is_chosen(model):
    assert value(build(str(model), [], "in-page"), "--kv-cache-memory-bytes") is None


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--max-model-len", "60k", "--kv-cache-memory-bytes", "2M"], {}, r"--max-model-len 60,000 is longer than the"),
        (["--max-model-len", "60k", "--kv-cache-memory-bytes", "2M"], {}, r"fits is --max-model-len 14592\. Change"),
        (["--max-model-len", "20000", "--num-gpu-blocks-override", "50"], {}, r"fits is --max-model-len 11008\."),
        (["--max-model-len", "65537"], {}, r"65,537 is longer than the 65,536 tokens that .*config\.json allows"),
        (["--gpu-memory-utilization", "0.92"], {}, r"asks for 22\.08 GiB, and 15\.00 GiB of 24\.00 GiB are free"),
        (["--gpu-memory-utilization", "92"], {}, r"--gpu-memory-utilization 92 is not a share of the memory"),
        (["--kv-cache-memory-bytes", "20g"], {}, r"--kv-cache-memory-bytes 20g asks for 18\.63 GiB, the weights 0\.21"),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "40"}, r"VLLM_CPU_KVCACHE_SPACE=40 asks for 40\.00 GiB"),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "0.5"}, r"VLLM_CPU_KVCACHE_SPACE=0\.5 is no pool: give whole GiB"),
        (["--speculative-config", "{}"], {}, r"speculative decoding \(--speculative-config\) is not covered yet"),
        (["--prefix-match-unit", "96"], {}, r"--prefix-match-unit 96 is no multiple of 64"),
        (["--prefix-cache-retention-interval", "300"], {}, r"300 is no multiple of the block of 256 tokens"),
    ],
)
def test_flags_that_cannot_start_are_refused_with_the_numbers(model, arguments, variables, message):
    with pytest.raises(ConfigError, match=message) as refused:
        launch(model, *arguments, variables=variables)
    assert "\n" not in str(refused.value)


def test_a_longer_length_than_the_models_can_be_forced_as_in_vllm(model):
    assert launch(model, "--max-model-len", "65537", variables={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system of a machine with 24 GiB, of which 15 are free."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {24 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {15 * 2**20} kB\n")
    write(tmp_path, "proc/self/status", "Name: x\nMems_allowed_list:\t0\n")
    return tmp_path


def node(root: Path, number: int, free: int) -> None:
    lines = {"MemTotal": 24, "MemFree": free, "Active(file)": 1, "Inactive(file)": 0, "SReclaimable": 0}
    text = "".join(f"Node {number} {name}: {size * 2**20} kB\n" for name, size in lines.items())
    write(root, f"sys/devices/system/node/node{number}/meminfo", text)


def test_the_memory_of_a_machine_is_what_its_kernel_says(root):
    found = Machine.here({}, root)
    assert found is not None
    assert (found.total, found.available, found.counts_files) == (24 * GIB, 15 * GIB, False)


def test_the_smaller_of_the_machines_and_its_nodes_figure_counts(root):
    node(root, 0, 12)
    assert Machine.here({}, root).available == 13 * GIB
    write(root, "proc/self/status", "Mems_allowed_list:\t0-1\n")
    node(root, 1, 4)
    assert Machine.here({}, root).nodes == (13 * GIB, 5 * GIB)
    assert Machine.here({"CPU_VISIBLE_MEMORY_NODES": "1"}, root).available == 5 * GIB


def test_a_cgroup_limits_both_figures_and_cached_files_count_as_vllm_counts_them(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", str(8 * GIB))
    write(root, "sys/fs/cgroup/memory.current", str(3 * GIB))
    write(root, "sys/fs/cgroup/memory.stat", f"inactive_file {2 * GIB}\n")
    found = Machine.here({}, root)
    assert (found.total, found.available, found.counts_files) == (8 * GIB, 5 * GIB, True)


def test_a_cgroup_around_it_that_vllm_does_not_read_limits_too_less_what_the_kernel_can_drop(root):
    write(root, "proc/self/cgroup", "4:memory:/a/b\n1:cpu:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1")
    write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", str(6 * GIB))
    write(root, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", str(5 * GIB))
    write(root, "sys/fs/cgroup/memory/a/memory.stat", f"total_inactive_file {GIB}\n")
    found = Machine.here({}, root)
    assert (found.total, found.available, found.counts_files) == (6 * GIB, 2 * GIB, False)


def test_choosing_imports_no_engine():
    code = "import sys, inpage.serve.pool, inpage.serve.checks, inpage.serve.weights, inpage.serve.machine as m; "
    code += "m.Machine.here(); print([n for n in ('vllm', 'transformers', 'torch', 'safetensors') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
