"""An offload of KV blocks in a recording or a what-if: simulated where all is known, otherwise refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from recordings import make_recording

from blis_replay.base.errors import UnreplayableError
from blis_replay.blis.offloading import offloading_of
from blis_replay.blis.trace import Offloading
from blis_replay.ingest.recording import Recording
from blis_replay.replay.engine import left_out, replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode, parse_engine_value

COSTS = "block_bytes=2097152 load_us=100 load_block_us=40 store_us=120 store_block_us=60"
OFFLOAD: dict[str, Any] = {"vllm_version": "0.32.0", "kv_offloading_size": 8.0, "kv_offloading_costs": COSTS}


def with_arguments(**arguments: Any) -> Recording:
    return with_engine(make_recording({"prompt_tokens": [10], "output_tokens": [5]}), arguments, "recorded")


def refused(recording: Recording) -> tuple[str, ...]:
    return left_out(recording, replayed_engine(recording, ReplayMode()).config)


def test_an_offload_whose_costs_are_known_is_simulated() -> None:
    """8 GiB are 4,096 blocks of 2 MiB."""
    recording = with_arguments(**OFFLOAD)
    replayed = replayed_engine(recording, ReplayMode())
    assert replayed.config.offloading == Offloading(4_096, 100, 40, 120, 60)
    assert replayed.basis["offload"].startswith(
        "4,096 KV blocks in CPU memory; a load of n blocks takes 100 + n * 40 us"
    )
    assert refused(recording) == ()


def test_a_block_takes_whole_pages_of_cpu_memory() -> None:
    """5,000 bytes take two pages of 4,096: of 1 GiB, 131,072 blocks."""
    costs = COSTS.replace("2097152", "5000")
    offloading = offloading_of({"kv_offloading_size": 1, "kv_offloading_costs": costs})
    assert offloading is not None and offloading.cpu_blocks == 131_072


@pytest.mark.parametrize(
    "change",
    [
        {"vllm_version": "0.30.0"},  # not compared
        {"kv_offloading_costs": "load_us=100 load_block_us=40 store_us=120 store_block_us=60"},  # no bytes of a block
        {"kv_offloading_costs": "block_bytes=2097152 load_us=100"},  # no time of a store
        {"kv_offloading_costs": "block_bytes=2097152 disk_us=100"},
        {"enable_prefix_caching": False},
        {"data_parallel_size": 2},
    ],
)
def test_an_offload_of_which_something_is_not_known_or_not_compared_is_refused(change: dict[str, Any]) -> None:
    recording = with_arguments(**OFFLOAD | change)
    assert replayed_engine(recording, ReplayMode()).config.offloading is None
    assert any(
        sentence.startswith("kv_offloading_size 8.0; in the replay no KV block") for sentence in refused(recording)
    )


def test_another_connector_is_refused() -> None:
    """Its rules are others, and so is a native offload that is configured by hand."""
    recording = with_arguments(**OFFLOAD | {"kv_transfer_config": "kv_connector=OffloadingConnector"})
    assert refused(recording) == (
        "kv_transfer_config kv_connector=OffloadingConnector; in the replay no KV block comes from or goes elsewhere "
        "(a pair with NIXL: validate --prefill)",
    )


def test_what_if_takes_an_offload() -> None:
    assert parse_engine_value("kv_offloading_size", "8") == 8.0
    mode = ReplayMode(engine=tuple(OFFLOAD.items()))
    assert replayed_engine(with_arguments(), mode).config.offloading == Offloading(4_096, 100, 40, 120, 60)
    with pytest.raises(UnreplayableError, match=r"kv_offloading_size; .*simulated where kv_offloading_costs are known"):
        replayed_engine(with_arguments(), ReplayMode(engine=(("kv_offloading_size", 8.0),)))
