"""The groups of KV blocks of a model, by its ``config.json`` and by the recorder's header."""

from __future__ import annotations

from typing import Any

import pytest

from blis_replay.ingest.readers.server.layers import groups_of_model, groups_of_specs

GPT_OSS = {"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128}
# google/gemma-3-27b-it: 62 layers, every sixth of full attention: 10, and 52 with a window, in groups of 10.
GEMMA_3_27B = {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024}}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (GPT_OSS, "window 128, full"),
        (GEMMA_3_27B, "window 1024 x6, full"),
        # The tiny Gemma 3 of the recording has four groups: three windows for each layer of full attention.
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 256, "sliding_window_pattern": 4},
            "window 256 x3, full",
        ),
        ({"num_hidden_layers": 32}, "1"),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 128}, "1"),
        # What is not told: other kinds, layers of other sizes, and 3 against 4 layers (releases differ).
        ({"layer_types": ["linear_attention", "full_attention"]}, "several"),
        (GPT_OSS | {"global_head_dim": 512}, "several"),
        ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 3, "sliding_window": 128}, "several"),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(config: dict[str, Any], groups: str) -> None:
    assert groups_of_model({"architectures": ["A"]} | config) == groups


def test_the_recorder_says_the_groups() -> None:
    window = {"kind": "SlidingWindowSpec", "block_size": 16, "sliding_window": 128}
    full = {"kind": "FullAttentionSpec", "block_size": 16}
    assert groups_of_specs([window, window, full], 16) == "window 128 x2, full"
    for unknown in ({"kind": "MambaSpec", "block_size": 16}, full | {"block_size": 32}):
        assert groups_of_specs([unknown, full], 16) == "several"
    assert groups_of_specs(None, 16) == "several"
