"""Coefficients and an engine for worked examples: the files of ``simulate``."""

from __future__ import annotations

RELEASE = """schema: blis-replay/coefficients/1
name: worked
status: valid
summary: The coefficients of a worked example.
source: blis-semantics, section 11
hardware: none
models:
  - model: some/Model
    tensor_parallelism: 1
    latency:
      kind: blackbox
      intercept: 1000 us
      per_prefill_token: 10 us/token
      per_decode_token: 5 us/token
      rounding: truncate
    lifecycle:
      pre_queue: 100 us
      pre_queue_per_prompt_token: 1 us/token
      post_token: 20 us
"""
ENGINE = "max_num_seqs: 8\nmax_num_batched_tokens: 2048\nmax_model_len: 4096\nasync_scheduling: false\n"
