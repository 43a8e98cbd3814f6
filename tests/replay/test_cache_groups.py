"""A real server with sliding windows, and what is refused of models with several groups of KV blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import make_recording

from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.readers.server.engine_settings import given_arguments
from blis_replay.replay.driver import replay
from blis_replay.replay.engine import left_out, replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.checksum import check_schedule
from blis_replay.replay.schedule.recorded import recorded_schedule
from blis_replay.validate.explain.schedule import meaning_of

GROUPS = "window 256 x3, full"


@pytest.mark.parametrize(
    ("version", "groups", "simulated"),
    [
        ("0.32.0", GROUPS, True),
        ("0.32.0", "4", False),  # the sizes of the windows are not known
        ("0.32.0", "several", False),
        ("0.32.0", "state x3, full", False),  # states with a prefix cache
        ("0.11.0", GROUPS, False),  # this release was not compared with several groups
        (None, GROUPS, False),
    ],
)
def test_what_was_not_compared_is_refused_by_name(version: str | None, groups: str, simulated: bool) -> None:
    said = {"kv_cache_groups": groups} | ({"vllm_version": version} if version else {})
    recording = with_engine(make_recording({"prompt_tokens": [10], "output_tokens": [5]}), said, "recorded")
    config = replayed_engine(recording, ReplayMode()).config
    assert bool(config.kv_cache_groups) == simulated
    assert [what.split(" ")[0] for what in left_out(recording, config)] == ([] if simulated else ["kv_cache_groups"])
    # A simulator of another has one kind of KV cache in any case.
    assert [what.split(" ")[0] for what in left_out(recording, config, embedded=False)] == ["kv_cache_groups"]


@pytest.mark.parametrize(
    ("groups", "blocks", "alike"),
    [
        (GROUPS, 8, True),  # four groups that hold two blocks of 16 tokens each
        (GROUPS, 7, False),
        ("window 256, full", 4, True),
        ("4", 8, True),
        ("several", 15, False),  # eight kinds at most
        ("several", 16, True),
    ],
)
def test_groups_that_all_fit_into_memory_change_nothing(groups: str, blocks: int, alike: bool) -> None:
    """vLLM 0.11 was not compared with groups.  32 tokens of a request in flight, and no prompt that shares a block."""
    said = {"kv_cache_groups": groups, "vllm_version": "0.11.0", "num_gpu_blocks": blocks + 1, "block_size": 16}
    columns = {"prompt_tokens": [20], "output_tokens": [12], "arrival_us": [0], "ttft_us": [1], "e2e_us": [2]}
    recording = with_engine(make_recording(columns), said | {"enable_prefix_caching": False}, "recorded")
    entry = ModelEntry("some/Model", 1, LatencyModel("blackbox", 1_000_000, 0, 0), Lifecycle())
    release = CoefficientRelease("own", "valid", "s", "s", "H100", "0" * 64, (entry,), fitted_on=())
    assert (replay(recording, release).not_simulated == ()) == alike


@pytest.mark.realdata
def test_a_real_gemma_3_is_scheduled_as_recorded(data_pack: Path, tmp_path: Path) -> None:
    """vLLM 0.29.0: three groups with windows beside full attention, by the model's config.json; 2,786 steps.

    Without them no step has the recorded KV usage: one group needs a fourth of the blocks.
    """
    config = tmp_path / "config.json"
    layers = {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 256, "sliding_window_pattern": 4}
    config.write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]} | layers), "utf-8")
    columns = "arrival=start_time:s,ttft=ttft:ms,e2e=latency:ms"
    (source,) = sources_of([data_pack / "live-vllm-0.29" / "gemma3"], columns=columns)
    with read_recording(source, given=given_arguments(config)) as recording:
        engine = replayed_engine(recording, ReplayMode()).config
        schedule = recorded_schedule(recording)
        check = check_schedule(schedule, engine)
        assert (check.steps, check.equal, check.kv_equal, check.kv_divergence) == (2_786, 2_786, 2_786, None)
        alone = check_schedule(schedule, replace(engine, kv_cache_groups=()))
        assert alone.kv_equal == 0
        # A recorder that counted four groups, and not how far windows reach: of all sizes one makes every step equal.
        found = meaning_of(with_engine(recording, {"kv_cache_groups": "4"}, "recorded"), alone)
        assert found is not None
        assert found.argument == ("kv_cache_groups", GROUPS)
