"""Larger made workloads for the scheduler oracle, one per feature, each plain and under KV pressure, sync and async."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle_workloads import B_NS_LOADED, DEFAULT_ARGS, Mix, Spec, arrivals_us, make_requests, make_spec, most_blocks


@dataclass(frozen=True)
class Named:
    """A named workload: settings over the defaults, its mix, its arrivals, and the blocks of its starved variant."""

    description: str
    args: dict[str, Any]
    mix: Mix
    arrivals: Callable[[np.random.Generator], list[int]]
    starved_blocks: int


CHAT = Mix(prompt_mean=665, output_mean=256)
NAMED = {
    "bursty": Named(
        "300 requests in bursts of 25 at one moment, 10/s on average",
        {},
        CHAT,
        lambda rng: arrivals_us(rng, 300, 100_000, burst=25),
        1500,
    ),
    "kv_tight": Named(
        "300 requests at 10/s, 1,500 blocks: preemption",
        {"num_gpu_blocks": 1500},
        CHAT,
        lambda rng: arrivals_us(rng, 300, 100_000),
        700,
    ),
    "long_prefill": Named(
        "prompts of 1,500 tokens, at most 256 of them a step and request",
        {"long_prefill_token_threshold": 256},
        Mix(prompt_mean=1500, output_mean=100),
        lambda rng: arrivals_us(rng, 300, 70_000),
        900,
    ),
    "priorities": Named(
        "four priorities with ties in priority and arrival, 1,500 blocks",
        {"policy": "priority", "num_gpu_blocks": 1500},
        Mix(prompt_mean=665, output_mean=256, priorities=4),
        lambda rng: arrivals_us(rng, 300, 90_000, burst=3),
        700,
    ),
    "multi_turn": Named(
        "conversations: prompts that repeat an earlier prompt and its reply",
        {"max_model_len": 8192},
        Mix(prompt_mean=400, output_mean=120, follow_up_share=0.8),
        lambda rng: arrivals_us(rng, 400, 150_000),
        350,
    ),
    "eviction": Named(
        "12 groups sharing 512 tokens, 800 blocks: cached prefixes come and go",
        {"num_gpu_blocks": 800},
        Mix(prompt_mean=636, output_mean=80, groups=12, group_prefix_tokens=512, group_share=0.9),
        lambda rng: arrivals_us(rng, 500, 80_000),
        450,
    ),
    "thrashing": Named(
        "450 blocks, prefix caching off: admitted, out of blocks, again",
        {"num_gpu_blocks": 450, "enable_prefix_caching": False},
        Mix(prompt_mean=1200, output_mean=256),
        lambda rng: arrivals_us(rng, 150, 110_000),
        260,
    ),
    "small_batches": Named(
        "8 sequences and 256 tokens a step",
        {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        Mix(prompt_mean=400, output_mean=100),
        lambda rng: arrivals_us(rng, 300, 150_000),
        200,
    ),
    "chunked_off": Named(
        "chunked prefill off, batches as long as the model allows: prompts wait for a batch with room",
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 2048},
        Mix(prompt_mean=700, output_mean=120),
        lambda rng: arrivals_us(rng, 300, 60_000, burst=4),
        700,
    ),
    "length_limit": Named(
        "outputs that run into max_model_len",
        {"max_model_len": 600},
        Mix(prompt_mean=400, output_mean=300, one_token_share=0.1),
        lambda rng: arrivals_us(rng, 300, 60_000),
        500,
    ),
}


def named_specs() -> Iterator[Spec]:
    """Every named workload as NAME (synchronous), NAME_async, and both again under KV pressure (`_starved`)."""
    for number, (name, named) in enumerate(NAMED.items()):
        for suffix, changed in {"": {}, "_starved": {"num_gpu_blocks": named.starved_blocks}}.items():
            for mode, asynchronous in {"": False, "_async": True}.items():
                rng = np.random.default_rng([0, number])
                args = DEFAULT_ARGS | named.args | changed | {"async_scheduling": asynchronous}
                requests = make_requests(rng, args, named.mix, named.arrivals(rng))
                args["num_gpu_blocks"] = max(args["num_gpu_blocks"], 1 + most_blocks(requests, args))
                pressure = f", {args['num_gpu_blocks']} blocks" if suffix else ""
                title = named.description + pressure + (", async" if asynchronous else "")
                yield make_spec(f"{name}{suffix}{mode}", title, args, B_NS_LOADED, requests)
