"""The groups of KV blocks of a model, by its ``config.json`` and by the recorder's header."""

from __future__ import annotations

from typing import Any

import pytest

from blis_replay.ingest.readers.server.layers import blocks_of_tokens, groups_in_words, groups_of_model, groups_of_specs

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
        # Qwen/Qwen3-Next-80B-A3B: three layers of linear attention, one of full attention.
        ({"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}, "state x3, full"),
        ({"num_hidden_layers": 32}, "1"),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 128}, "1"),
        # What is not told: other kinds, layers of other sizes, and 3 against 4 layers (releases differ).
        ({"layer_types": ["mamba", "full_attention"]}, "several"),
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
    chunk = {"kind": "ChunkedLocalAttentionSpec", "block_size": 16, "attention_chunk_size": 8192}
    assert groups_of_specs([chunk, chunk, chunk, full], 16) == "chunk 8192 x3, full"
    for unknown in ({"kind": "MambaSpec", "block_size": 16}, full | {"block_size": 32}):
        assert groups_of_specs([unknown, full], 16) == "several"
    assert groups_of_specs(None, 16) == "several"


def test_groups_are_said_in_words() -> None:
    assert groups_in_words("window 512 x5, full") == [("window", 512)] * 5 + [("full", 0)]
    assert groups_in_words("chunk 8192 x3, full, state") == [("chunk", 8192)] * 3 + [("full", 0), ("state", 0)]
    for unclear in ("several", "4", "window", "full 3", "state 3", "window 512; full"):
        assert groups_in_words(unclear) is None


def test_the_log_tells_the_blocks_of_known_groups() -> None:
    """The recorded Gemma 3 printed 3,542 tokens and 1.73x for 2,048: 64 blocks over 16 + 3 * (6 + 1) = 37.

    A window of 256 holds 255 tokens and the 512 of a step: 6 blocks of 128, and one more across the ends.
    """
    assert blocks_of_tokens("window 256 x3, full", 3_542, 2_048, 128, 512) == 64
    assert blocks_of_tokens("chunk 256, full", 3_542, 2_048, 128, 512) is None
