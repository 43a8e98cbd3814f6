"""Engine arguments: who says them wins in a fixed order, and every one names its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import recorded_file

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.requests import ServerFacts
from blis_replay.ingest.readers.server.engine_defaults import Machine, gpu_gib_of
from blis_replay.ingest.readers.server.engine_settings import (
    RESOLVED,
    EngineEvidence,
    GivenArguments,
    engine_of,
    engine_settings,
    profile_arguments,
    read_engine_file,
)
from blis_replay.ingest.readers.server.log import ServerLog
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, STEP_SCHEMA, Finding, Setting
from blis_replay.ingest.rows import no_rows

SERVER = Machine(offline=False, listed=True)


def on(device: str, gib: int | None = None) -> Machine:
    return Machine(device=device, gpu_gib=gib, offline=False, listed=True)


def of(version: str) -> list[tuple[str, str, dict[str, object]]]:
    return [("recorded", "server log", {"vllm_version": version})]


def measured(findings: tuple[Finding, ...]) -> list[dict[str, object]]:
    return [dict(finding.measured) for finding in findings]


def contradiction(argument: str, used: object, also: object) -> dict[str, object]:
    return {"argument": argument, "used": str(used), "also": str(also)}


def test_the_first_source_wins_and_each_contradiction_is_a_finding_with_both_values() -> None:
    settings, findings = engine_settings(
        [
            ("file", "mine.yaml", {"max_num_seqs": 64}),
            ("recorded", "server log", {"max_num_seqs": 128, "max_model_len": 4096}),
            ("recorded", "exp-config.yaml", {"max_model_len": 8192}),
            ("profile", "bundled profile", {"max_model_len": 2048, "num_gpu_blocks": 26603}),
        ],
        on("gpu", 80),
    )
    assert settings["max_num_seqs"] == Setting(64, "file", "mine.yaml")
    assert settings["max_model_len"] == Setting(4096, "recorded", "server log")
    assert settings["num_gpu_blocks"] == Setting(26603, "profile", "bundled profile")
    assert measured(findings) == [contradiction("max_num_seqs", 64, 128), contradiction("max_model_len", 4096, 8192)]
    assert findings[0].message == "max_num_seqs is 64 in mine.yaml (used) and 128 in server log"


@pytest.mark.parametrize(
    ("version", "device", "value", "source"),
    [
        # vllm/config/scheduler.py: False in 0.13.0, None (on unless something forbids it) in 0.14.0.
        ("0.11.0", "gpu", False, "default"),
        ("0.13.0", "gpu", False, "default"),
        ("0.14.0", "gpu", True, "default"),
        ("0.15.1", "gpu", True, "default"),
        ("1.0", "gpu", True, "default"),
        # vllm/platforms/cpu.py switches it off.
        ("0.13.0", "cpu", False, "default"),
        ("0.32.0", "cpu", False, "derived"),
        ("0.32.0+cpu", None, False, "derived"),
        # What it depends on is not known: a build without tags is called 0.1.dev.
        ("0.32.0", None, True, "unknown"),
        ("0.1.dev1+g2", "gpu", False, "unknown"),
        ("dev", "gpu", False, "unknown"),
    ],
)
def test_asynchronous_scheduling_by_release_and_device(
    version: str, device: str | None, value: bool, source: str
) -> None:
    settings, _findings = engine_settings(of(version), replace(SERVER, device=device))
    assert (settings["async_scheduling"].value, settings["async_scheduling"].source) == (value, source)


@pytest.mark.parametrize(("drafter", "asynchronous"), [("ngram", False), ("ngram_gpu", True), ("eagle3", True)])
def test_some_drafters_switch_asynchronous_scheduling_off(drafter: str, asynchronous: bool) -> None:
    """vllm/config/vllm.py of 0.20 to 0.33, where nobody asks for it."""
    drafts = ("recorded", "log", {"speculative_config": {"method": drafter, "num_speculative_tokens": 2}})
    settings, _findings = engine_settings([*of("0.32.0"), drafts], on("gpu", 80))
    assert settings["async_scheduling"].value is asynchronous


@pytest.mark.parametrize(
    ("machine", "version", "seqs", "budget", "block"),
    [
        # vllm/engine/arg_utils.py, get_batch_defaults; vllm/platforms/cpu.py; vllm/config/cache.py
        (on("gpu", 80), "0.32.0", 1024, 8192, 16),
        (on("gpu", 180), "0.27.1", 1024, 8192, 16),
        (on("gpu", 180), "0.28.0", 1024, 16384, 16),
        (on("gpu", 24), "0.32.0", 256, 2048, 16),
        (replace(on("gpu", 24), offline=True), "0.32.0", 256, 8192, 16),
        (replace(on("gpu", 80), offline=True), "0.11.0", 1024, 16384, 16),
        (on("cpu"), "0.32.0", 128, 2048, 128),
        (replace(on("cpu"), offline=True), "0.11.2", 256, 4096, 128),
    ],
)
def test_defaults_by_device_memory_entry_point_and_release(
    machine: Machine, version: str, seqs: int, budget: int, block: int
) -> None:
    settings, _findings = engine_settings(of(version), machine)
    names = ("max_num_seqs", "max_num_batched_tokens", "block_size")
    assert tuple(settings[name].value for name in names) == (seqs, budget, block)
    assert {settings[name].source for name in names} == {"default"}
    assert "num_gpu_blocks" not in settings


def test_cpu_defaults_count_the_ranks() -> None:
    """vllm/engine/arg_utils.py: times tensor and pipeline parallelism."""
    settings, _findings = engine_settings(
        [("recorded", "log", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3})], on("cpu")
    )
    assert (settings["max_num_seqs"].value, settings["max_num_batched_tokens"].value) == (768, 12288)


def test_what_a_default_depends_on_and_is_not_known_is_said() -> None:
    settings, _findings = engine_settings([], SERVER)
    assert settings["max_num_seqs"] == Setting(
        256, "unknown", "assumed; 128 on a CPU; 1,024 on a GPU of at least 70 GiB"
    )
    assert settings["block_size"] == Setting(16, "unknown", "assumed; 128 on a CPU")
    assert settings["async_scheduling"] == Setting(False, "unknown", "assumed; true from vLLM 0.14 on")
    assert settings["enable_prefix_caching"].source == "default"


def test_a_default_is_an_assumption_where_the_servers_arguments_are_not_recorded() -> None:
    settings, _findings = engine_settings(of("0.15.1"), replace(on("gpu", 80), listed=False))
    assert settings["max_num_seqs"] == Setting(
        1024,
        "unknown",
        "assumed: default of vLLM on a GPU of at least 70 GiB as a server; the server's arguments are not recorded",
    )
    assert settings["async_scheduling"].source == "unknown"
    settings, _findings = engine_settings(of("0.32.0"), replace(on("cpu"), listed=False))
    assert settings["async_scheduling"].source == "derived"  # there it cannot be switched on


@pytest.mark.parametrize(("budget", "seqs"), [(2048, 256), (8192, 1024), (16384, 1024)])
def test_a_resolved_default_of_the_token_budget_tells_the_memory(budget: int, seqs: int) -> None:
    """A server takes 8,192 by itself on GPUs of 70 GiB and more only, which have 1,024 sequences."""
    settings, _findings = engine_settings([("recorded", RESOLVED, {"max_num_batched_tokens": budget})], on("gpu"))
    assert (settings["max_num_seqs"].value, settings["max_num_seqs"].source) == (seqs, "derived")
    assert f"max_num_batched_tokens {budget}" in settings["max_num_seqs"].detail


@pytest.mark.parametrize(
    ("arguments", "seqs", "budget"),
    [
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"max_model_len": 4}, 256, 1024),
        ({"max_model_len": 4096, "enable_chunked_prefill": False}, 256, 4096),
        ({"performance_mode": "throughput"}, 512, 4096),
    ],
)
def test_defaults_keep_within_other_arguments(arguments: dict[str, object], seqs: int, budget: int) -> None:
    """vllm/engine/arg_utils.py, _set_default_max_num_seqs_and_batched_tokens_args."""
    settings, _findings = engine_settings([("recorded", "exp-config.yaml", arguments)], on("gpu", 24))
    assert (settings["max_num_seqs"].value, settings["max_num_batched_tokens"].value) == (seqs, budget)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("H100-SXM-80GB", 80),
        ("NVIDIA H200", 141),
        ("NVIDIA B200", 180),
        ("A100-80GB", 40),  # vLLM takes no A100 for a large GPU
        ("NVIDIA GeForce RTX 4090", 24),
        ("NVIDIA RTX PRO 6000 Blackwell", 95),
        ("L40S", 24),
        ("Accelerator 96GB", 96),
        ("Accelerator", None),
        (None, None),
    ],
)
def test_the_memory_of_a_gpu_by_its_name(name: str | None, gib: int | None) -> None:
    assert gpu_gib_of(name) == gib


@pytest.mark.parametrize(
    ("version", "scheduled_as"),
    [("0.32.0", None), ("0.99.0", "0.33.0"), ("0.32.1rc1.dev7+g12ab34", "0.32.0"), ("0.1.dev1+g2", "0.33.0")],
)
def test_the_release_that_stands_for_the_recorded_one_is_a_finding(version: str, scheduled_as: str | None) -> None:
    _settings, findings = engine_of(evidence(ServerLog(version=version)), None)
    assert measured(findings) == ([] if scheduled_as is None else [{"scheduled_as": scheduled_as}])


def evidence(
    log: ServerLog, configured: dict[str, object] | None = None, hardware: str | None = None
) -> EngineEvidence:
    written = [ServerFacts(engine=configured or {}, name="exp-config.yaml")]
    return EngineEvidence(written, log, {}, hardware, no_rows(STEP_SCHEMA), no_rows(JOURNEY_EVENT_SCHEMA))


def test_what_runs_goes_before_what_was_asked_for_and_that_before_what_was_written_down() -> None:
    log = ServerLog(
        version="0.32.0", given={"max_model_len": 9000, "max_num_seqs": 32}, resolved={"max_model_len": 4096}
    )
    settings, findings = engine_of(evidence(log, {"max_num_seqs": 256, "block_size": 16}), None)
    assert settings["max_model_len"] == Setting(4096, "recorded", "server log, as it runs")
    assert settings["max_num_seqs"] == Setting(32, "recorded", "server log, as started")
    assert settings["block_size"] == Setting(16, "recorded", "exp-config.yaml")
    assert measured(findings) == [contradiction("max_model_len", 4096, 9000), contradiction("max_num_seqs", 32, 256)]


def test_kv_blocks_are_derived_from_tokens_and_the_block_size_of_the_device() -> None:
    """65,536 / 128: CPUs have blocks of 128 tokens (vllm/platforms/cpu.py)."""
    log = ServerLog(version="0.32.0", resolved={"device": "cpu"}, kv_tokens=65_536, listed=True)
    settings, findings = engine_of(evidence(log), None)
    detail = "65,536 tokens of KV cache in the server log / block size 128"
    assert settings["num_gpu_blocks"] == Setting(512, "derived", detail)
    assert findings == ()
    settings, findings = engine_of(evidence(log), GivenArguments({"block_size": 64, "num_gpu_blocks": 9}, "e.yaml"))
    assert settings["num_gpu_blocks"] == Setting(9, "file", "e.yaml")
    assert measured(findings) == [contradiction("num_gpu_blocks", 9, 1024)]


def test_a_hybrid_model_leaves_kv_blocks_unknown_and_a_finding_says_why() -> None:
    """vllm-project/vllm#40384: the printed tokens are 2 to 4 times too few there."""
    settings, findings = engine_of(evidence(ServerLog(kv_tokens=290_864, hybrid="Add 1 padding layers")), None)
    assert "num_gpu_blocks" not in settings
    (finding,) = findings
    assert (finding.check, finding.measured) == (
        "engine_arguments",
        {"argument": "num_gpu_blocks", "kv_tokens": 290_864},
    )
    assert "2 to 4 times too few" in finding.message


def test_what_could_not_be_read_of_the_log_is_told() -> None:
    log = ServerLog(given={"block_size": "f(3)"}, as_text={"block_size": "f(3)", "hf_token": "g()"}, cut=True)
    settings, findings = engine_of(evidence(log, hardware="H100"), None)
    assert settings["block_size"].source == "unknown"
    assert measured(findings) == [{"argument": "block_size"}, {}, {}]
    assert "block_size 'f(3)'" in findings[1].message and "hf_token" not in findings[1].message
    assert "is cut off" in findings[2].message


def test_every_argument_of_the_live_recordings_with_its_source(data_pack: Path) -> None:
    """Their README: vLLM 0.32.0 on a CPU, synchronous, blocks of 128, 512 of them, 32 sequences, 1,024 tokens."""
    for run in ("A", "C"):
        with read_recording(data_pack / "live-vllm-0.32" / run) as recording:
            found = {name: (s.value, s.source) for name, s in recording.engine.items()}
            assert not [finding for finding in recording.findings if finding.check == "engine_arguments"]
        assert found["async_scheduling"] == (False, "derived")
        assert {name: source for name, (_value, source) in found.items() if source != "recorded"} == {
            "async_scheduling": "derived",
            "scheduling_policy": "default",
            "long_prefill_token_threshold": "default",
        }
        expected = {
            "vllm_version": "0.32.0",
            "device": "cpu",
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "max_model_len": 4096,
            "block_size": 128,
            "num_gpu_blocks": 512,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }
        assert {name: found[name][0] for name in expected} == expected


def test_arguments_that_are_not_simulated_are_kept_in_short() -> None:
    said = {
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3, "model": None},
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        "cudagraph_mode": "<CUDAGraphMode.FULL: 2>",
        "data_parallel_size": 4,
    }
    settings, _findings = engine_settings([("recorded", "server log", said)], SERVER)
    assert {name: settings[name].value for name in said} == {
        "speculative_config": "method=eagle3 num_speculative_tokens=3",
        "cudagraph_capture_sizes": "1 2 4 8 16",
        "cudagraph_mode": "FULL",
        "data_parallel_size": 4,
    }


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([*range(512, 0, -8), 4, 2, 1], "1 2 4 8..512/8"),  # as vLLM 0.11 logs them
        ([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], "1 2 4 8..256/8 272..512/16"),  # and 0.15
        ([1, 2, 3, 7, 8, 9, 10], "1 2 3 7..10/1"),
        ([16], "16"),
        ([], "none"),
    ],
)
def test_sizes_of_captured_graphs_are_kept_whole(sizes: list[int], kept: str) -> None:
    """As ``1..512 (67 sizes)`` they were read back as the three sizes 1, 67 and 512."""
    settings, _findings = engine_settings([("recorded", "server log", {"cudagraph_capture_sizes": sizes})], SERVER)
    assert settings["cudagraph_capture_sizes"].value == kept


@pytest.mark.parametrize(
    ("said", "dtype"), [("torch.bfloat16", "bfloat16"), ("half", "float16"), ("FP8", "fp8"), ("float", "float32")]
)
def test_a_data_type_has_one_name(said: str, dtype: str) -> None:
    """vLLM's --dtype has two names for two of them, and its log a prefix."""
    assert engine_settings([("recorded", "exp-config.yaml", {"dtype": said})], SERVER)[0]["dtype"].value == dtype


def test_a_data_type_chosen_by_the_server_is_not_known() -> None:
    settings, findings = engine_settings([("recorded", "server log", {"dtype": "auto"})], SERVER)
    assert "dtype" not in settings
    assert findings == ()


def test_a_recorded_value_that_is_no_count_is_passed_over_and_told() -> None:
    settings, findings = engine_settings([("recorded", "server log", {"max_num_seqs": -3})], on("gpu", 24))
    assert settings["max_num_seqs"].source == "default"
    assert measured(findings) == [{"argument": "max_num_seqs"}]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "max_num_seq: 3\n",
            "field max_num_seq: not an engine argument of vLLM 0.11 to 0.32; did you mean max_num_seqs",
        ),
        ("max_num_seqs: 3\nmax-num-seqs: 4\n", "max_num_seqs is given twice, as '3' and '4'"),
        ("qqq: 3\n", "remove it, or use one of max_num_seqs, "),
        ("max_num_seqs: many\n", "give a positive whole number"),
        ("async_scheduling: 1\n", "give true or false"),
        ("- 1\n", "a list where a mapping is expected"),
    ],
)
def test_an_engine_file_with_a_mistake_is_refused_with_the_field(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(RecordingError, match=problem):
        read_engine_file(recorded_file(tmp_path, content))


def test_dashes_and_underscores_mean_the_same(tmp_path: Path) -> None:
    assert read_engine_file(recorded_file(tmp_path, "max-num-seqs: 32\n")) == {"max_num_seqs": 32}
    assert profile_arguments({"engine": {"max-num-seqs": 32}, "vllm_version": "0.15.1"}) == {
        "max_num_seqs": 32,
        "vllm_version": "0.15.1",
    }


def test_a_number_too_long_to_print_is_told_and_passed_over(tmp_path: Path) -> None:
    """Python refuses to print integers of more than 4,300 digits in decimal; YAML reads them in hexadecimal."""
    huge = "0x" + "f" * 5_000
    settings, findings = engine_settings([("recorded", "trace header", {"max_num_seqs": int(huge, 16)})], SERVER)
    assert not settings["max_num_seqs"].said
    assert measured(findings) == [{"argument": "max_num_seqs"}]
    for content in (f"max_num_seqs: {huge}\n", f"? {huge}\n: 1\n"):
        with pytest.raises(RecordingError, match="a number of more than 400 digits"):
            read_engine_file(recorded_file(tmp_path, content))
