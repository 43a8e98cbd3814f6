"""Made workloads for the scheduler oracle: random ones, and larger named ones, one per feature."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Spec = dict[str, Any]
Segments = list[list[int]]

GROUP_TAG_BASE = 10000
GENERATED_TAG_BASE = 20000
DEFAULT_ARGS: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "block_size": 16,
    "num_gpu_blocks": 26602,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "policy": "fcfs",
    "async_scheduling": False,
}
B_NS_LOADED = [7_000_000, 18_000, 25_000, 10]
# Steady, loaded, one with parts that need rounding, and two in which steps end on the arrival grid.
B_NS_CHOICES = [
    [15_000_000, 1_000, 10_000, 0],
    B_NS_LOADED,
    [3_333_500, 40_123, 101_499, 7],
    [10_000_000, 0, 0, 0],
    [5_000_000, 0, 1_000_000, 0],
]
ARRIVAL_GRID_US = 5_000


@dataclass(frozen=True)
class Mix:
    """What the requests of a workload look like: lengths in tokens, shares between 0 and 1."""

    prompt_mean: float
    output_mean: float
    one_token_share: float = 0.0
    groups: int = 0
    group_prefix_tokens: int = 0
    group_share: float = 0.0
    identical_share: float = 0.0
    follow_up_share: float = 0.0
    priorities: int = 1
    unlimited_output_share: float = 0.0


def random_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`: 20 to 150 requests, settings drawn over all features."""
    rng = np.random.default_rng([seed, index])
    args, b_ns = _random_args(rng), _pick(rng, B_NS_CHOICES)
    newer = np.random.default_rng([seed, index, 1])
    args |= _newer_args(newer, args)
    mix = _random_mix(rng, args)
    count = int(rng.integers(20, 151))
    requests = make_requests(rng, args, mix, _random_arrivals(rng, count, mix, b_ns, args))
    needed = most_blocks(requests, args)
    args["num_gpu_blocks"] = 1 + max(needed, math.ceil(needed * _pick(rng, [1.0, 1.05, 1.3, 2.0, 3.0, 5.0, 100.0])))
    _add_aborts(newer, requests)
    return make_spec(f"rand-{seed}-{index:05d}", f"random workload, seed {seed}, index {index}", args, b_ns, requests)


def drafting_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, with speculative decoding: a drafter, and what of it is accepted.

    Each request has two texts of digits, one for each output token that there can be already: how many tokens are
    drafted behind it, and how many of them would be accepted.
    """
    spec = random_spec(seed, index)
    rng = np.random.default_rng([seed, index, 2])
    args, requests = spec["engine_args"], spec["requests"]
    drafts, method = _pick(rng, [1, 2, 3, 5]), _pick(rng, ["ngram", "eagle"])
    args |= {"speculative_method": method, "num_speculative_tokens": drafts}
    rate, silent = _pick(rng, [0.0, 0.3, 0.7, 0.9]), _pick(rng, [0.0, 0.3])
    for request in requests:
        count = request["output_tokens"]
        drafted = np.where(rng.random(count) < silent, rng.integers(0, drafts + 1, count), drafts)
        if method != "ngram":
            drafted[:] = drafts
        accepted = np.minimum(rng.geometric(1 - rate, count) - 1, drafts)
        request |= {"drafted": "".join(map(str, drafted)), "accepted": "".join(map(str, accepted))}
    # Drafts take blocks beyond those of the tokens that stay: those in flight, and room for the next ones.
    beyond = math.ceil(4 * (drafts + 1) / args["block_size"])
    args["num_gpu_blocks"] = max(args["num_gpu_blocks"], 1 + most_blocks(requests, args) + beyond)
    return _of_series(spec, "draft", seed, index, ", speculative decoding")


def paced_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, with prefills held back; every fourth speculates."""
    spec = drafting_spec(seed, index) if index % 4 == 3 else random_spec(seed, index)
    if spec["engine_args"].get("speculative_method") == "eagle":
        spec["engine_args"]["speculative_method"] = "ngram"
    rng = np.random.default_rng([seed, index, 3])
    spec["engine_args"]["prefill_schedule_interval"] = _pick(rng, [2, 3, 8])
    return _of_series(spec, "paced", seed, index, ", prefills held back")


def grouped_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, with sliding windows or chunks beside full attention."""
    spec = random_spec(seed, index)
    rng = np.random.default_rng([seed, index, 4])
    args = spec["engine_args"]
    args["block_size"] = block = _pick(rng, [16, 16, 32, 64, 128, 256])
    size = _pick(rng, [1, 2, 3, 4, 8]) * block + _pick(rng, [0, 0, 1, -1, block // 2])
    kind = _pick(rng, ["window", "window", "window", "chunk"])
    if kind == "chunk":
        size = -(-size // block) * block
    groups = [[kind, size]] * _pick(rng, [1, 1, 2, 3, 5])
    if kind == "window" and rng.random() < 0.2:
        groups += [["window", 2 * size]]
    args["kv_cache_groups"] = [*groups, ["full", 0]] if rng.random() < 0.8 else [["full", 0], *groups]
    if rng.random() < 0.1:
        args["kv_cache_groups"] = groups[:1]
    if any(kind == "window" for kind, _ in args["kv_cache_groups"]):
        args["prefix_cache_retention_interval"] = _pick(rng, [0, 0, block, 4 * block])
    # Of a window a request never holds more than it, what two steps compute, and blocks that stand across the ends.
    tokens = [size + 2 * args["max_num_batched_tokens"] if size else math.inf for _, size in args["kv_cache_groups"]]
    most = most_blocks(spec["requests"], args)
    least = max(most, sum(min(most, n / block + 3) for n in tokens))
    room = _pick(rng, [0.0, 0.0, 0.0, 0.1, 0.5, 2.0])
    args["num_gpu_blocks"] = 1 + math.ceil(least + room * most * len(tokens))
    return _of_series(spec, "groups", seed, index, ", several groups of KV blocks")


def state_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, with states beside full attention, or drafts beside windows."""
    drafts = index % 2 == 1
    spec = grouped_spec(seed, index)
    args, rng = spec["engine_args"], np.random.default_rng([seed, index, 5])
    if drafts:
        drafting = drafting_spec(seed, index)
        args |= {"speculative_method": "ngram"}
        args["num_speculative_tokens"] = drafting["engine_args"]["num_speculative_tokens"]
        for request, drafted in zip(spec["requests"], drafting["requests"], strict=True):
            request |= {name: drafted[name] for name in ("drafted", "accepted")}
        args["num_gpu_blocks"] += 8 * len(args["kv_cache_groups"])
    else:
        args["enable_prefix_caching"] = False
        args.pop("prefix_cache_retention_interval", None)
        args["kv_cache_groups"] = [["state", 0]] * _pick(rng, [1, 3]) + [["full", 0]]
        args["num_gpu_blocks"] += len(args["kv_cache_groups"])
    return _of_series(spec, "states", seed, index)


def offloading_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, with KV blocks offloaded to CPU memory.

    `kv_offloading`: blocks of CPU memory, and how long a load and a store take, each in us and in us for each block.
    """
    spec = random_spec(seed, index)
    rng = np.random.default_rng([seed, index, 6])
    args = spec["engine_args"] | {"enable_prefix_caching": True}
    most = most_blocks(spec["requests"], args)
    # Few blocks on the GPU: what was computed is found on the CPU.
    args["num_gpu_blocks"] = 1 + math.ceil(most * _pick(rng, [1.0, 1.3, 2.0, 3.0, 5.0, 20.0]))
    blocks = max(1, int(most * _pick(rng, [0.5, 2.0, 10.0, 100.0])))
    args["kv_offloading"] = [blocks, *_pick(rng, [[1, 0, 1, 0], [100, 50, 100, 80], [3000, 1000, 5000, 2500]])]
    spec["engine_args"] = args
    return _of_series(spec, "offload", seed, index, ", offload to CPU memory")


def remote_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, whose prompts another server has computed, in part or whole."""
    spec = offloading_spec(seed, index)
    rng = np.random.default_rng([seed, index, 7])
    spec["engine_args"]["kv_offloading"] = [0, *_pick(rng, [[1, 0], [100, 50], [3000, 1000]]), 0, 0]
    whole = _pick(rng, [0.0, 0.5, 1.0])
    for request in spec["requests"]:
        prompt = _tokens(request["prompt"])
        request["external_tokens"] = prompt if rng.random() < whole else int(rng.integers(0, prompt + 1))
    return _of_series(spec, "remote", seed, index)


def producer_spec(seed: int, index: int) -> Spec:
    """Workload `index` of the random series `seed`, whose blocks other servers fetch; every second one loads some too.

    Each request is for another server with a share, and then `fetched_us` is when that one has the blocks, else -1.
    """
    spec = remote_spec(seed, index)
    rng = np.random.default_rng([seed, index, 8])
    share, one_token, later_us = _pick(rng, [0.5, 1.0]), rng.random() < 0.5, _pick(rng, [2e4, 2e5, 2e6])
    for request in spec["requests"]:
        if index % 2 == 0:
            del request["external_tokens"]
        if one_token:
            request["output_tokens"] = 1
        fetched_us = request["arrival_us"] + min(int(rng.exponential(later_us)), 8_000_000)
        request["fetched_us"] = fetched_us if rng.random() < share else -1
    return _of_series(spec, "producer", seed, index)


def _of_series(spec: Spec, series: str, seed: int, index: int, more: str = "") -> Spec:
    """The workload with its name in a series, and with what it has beyond the one that it is made of."""
    return spec | {"scenario": f"{series}-{seed}-{index:05d}", "description": spec["description"] + more}


# The random series, by the first part of a workload's name.
SERIES = {
    "rand": random_spec,
    "draft": drafting_spec,
    "paced": paced_spec,
    "groups": grouped_spec,
    "states": state_spec,
    "offload": offloading_spec,
    "remote": remote_spec,
    "producer": producer_spec,
}


def _random_args(rng: np.random.Generator) -> dict[str, Any]:
    max_num_seqs = _pick(rng, [1, 2, 3, 4, 8, 16, 64, 128])
    budgets = [n for n in (16, 33, 64, 100, 256, 512, 2048) if n >= max_num_seqs]
    args = DEFAULT_ARGS | {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": _pick(rng, budgets),
        "max_model_len": _pick(rng, [96, 128, 300, 512, 1024, 4096]),
        "block_size": _pick(rng, [16, 16, 16, 8, 32]),
        "enable_prefix_caching": bool(rng.random() < 0.8),
        "enable_chunked_prefill": bool(rng.random() < 0.85),
        "long_prefill_token_threshold": _pick(rng, [0, 0, 0, 8, 16, 33, 64, 100, 256]),
        "policy": _pick(rng, ["fcfs", "fcfs", "priority"]),
        "async_scheduling": bool(rng.random() < 0.5),
    }
    # Newer releases refuse a threshold above the model length.
    args["long_prefill_token_threshold"] = min(args["long_prefill_token_threshold"], args["max_model_len"])
    if not args["enable_chunked_prefill"]:
        # vLLM refuses a batch smaller than the model length then; just as small is the case that blocks admissions.
        args["max_num_batched_tokens"] = max(args["max_num_seqs"], args["max_model_len"] + _pick(rng, [0, 0, 37, 512]))
    return args


def _newer_args(rng: np.random.Generator, args: Spec) -> Spec:
    """What only some releases have, and now and then the block size of CPUs."""
    newer = {
        "block_size": 128 if rng.random() < 0.1 else args["block_size"],
        "scheduler_reserve_full_isl": bool(rng.random() < 0.7),
        "watermark": _pick(rng, [0.0, 0.0, 0.0, 0.01, 0.05, 0.3]),
        "long_prefill_token_threshold_adaptive": bool(rng.random() < 0.3),
        "max_num_active_seqs": _pick(rng, [None, None, None, max(1, args["max_num_seqs"] // 2)]),
    }
    half = max(args["max_num_seqs"], args["max_num_batched_tokens"] // 2)
    scheduled = _pick(rng, [None, None, None, half])
    return newer | ({"max_num_scheduled_tokens": scheduled} if args["enable_chunked_prefill"] else {})


def _add_aborts(rng: np.random.Generator, requests: list[Spec]) -> None:
    """Let the clients of some requests give up some time after they were sent."""
    share, patience_us = _pick(rng, [0.0, 0.0, 0.1, 0.4]), _pick(rng, [50_000, 400_000, 3_000_000])
    for request in requests:
        if rng.random() < share:
            request["abort_us"] = request["arrival_us"] + 1 + int(rng.exponential(patience_us))


def _random_mix(rng: np.random.Generator, args: dict[str, Any]) -> Mix:
    prompt_mean = min(_pick(rng, [20, 60, 150, 300]), args["max_model_len"] * 0.7)
    return Mix(
        prompt_mean=prompt_mean,
        output_mean=_pick(rng, [2, 8, 20, 40]),
        one_token_share=_pick(rng, [0.0, 0.1, 0.5]),
        groups=_pick(rng, [0, 1, 2, 5]),
        group_prefix_tokens=int(rng.integers(1, max(2, int(prompt_mean)))),
        group_share=_pick(rng, [0.3, 0.8]),
        identical_share=_pick(rng, [0.0, 0.2]),
        follow_up_share=_pick(rng, [0.0, 0.2, 0.6]),
        priorities=_pick(rng, [1, 2, 3, 10]),
        unlimited_output_share=_pick(rng, [0.0, 0.0, 0.1]),
    )


def _random_arrivals(
    rng: np.random.Generator, count: int, mix: Mix, b_ns: list[int], args: dict[str, Any]
) -> list[int]:
    concurrency = min(args["max_num_seqs"], 16)
    per_token_us = (b_ns[0] / concurrency + b_ns[2]) / 1000
    service_us = mix.prompt_mean * b_ns[1] / 1000 + mix.output_mean * per_token_us
    return arrivals_us(
        rng,
        count,
        gap_us=service_us / _pick(rng, [0.2, 0.7, 1.0, 2.0, 10.0]),
        burst=_pick(rng, [1, 1, 1, 2, 7, 30, count]),
        grid_us=_pick(rng, [1, 1, ARRIVAL_GRID_US]),
    )


def arrivals_us(rng: np.random.Generator, count: int, gap_us: float, burst: int = 1, grid_us: int = 1) -> list[int]:
    """`count` sorted arrival times from 0, Poisson of mean gap `gap_us` a request, in bursts of equal times."""
    starts = np.cumsum(rng.exponential(gap_us * burst, size=-(-count // burst)))
    times = np.repeat(starts - starts[0], burst)[:count]
    return [int(t) // grid_us * grid_us for t in times]


def make_requests(rng: np.random.Generator, args: dict[str, Any], mix: Mix, arrivals: list[int]) -> list[Spec]:
    """The requests of a workload, in order of arrival; every prompt fits the model, outputs may run into its limit."""
    requests: list[Spec] = []
    for index, arrival in enumerate(arrivals):
        prompt, group, prefix_tokens = _prompt(rng, args, mix, index, requests)
        requests.append(
            {
                "request_id": f"r{index:05d}",
                "arrival_us": arrival,
                "priority": int(rng.integers(0, mix.priorities)),
                "output_tokens": _output_tokens(rng, args, mix),
                "prompt": prompt,
                "prefix_group": group,
                "prefix_len": prefix_tokens,
            }
        )
    return requests


def _prompt(
    rng: np.random.Generator, args: dict[str, Any], mix: Mix, index: int, earlier: list[Spec]
) -> tuple[Segments, str | int, int]:
    """Segments, prefix group (empty: none) and shared prefix length of a new prompt."""
    own = [index + 1, 0, _length(rng, mix.prompt_mean)]
    if earlier and rng.random() < mix.follow_up_share:
        prompt = _follow_up(rng, args, earlier, own)
        if _tokens(prompt) < args["max_model_len"]:
            return prompt, "", 0
    if mix.groups and rng.random() < mix.group_share:
        group = int(rng.integers(0, mix.groups))
        shared = min(mix.group_prefix_tokens, args["max_model_len"] - 1)
        # A group may share whole prompts: then nothing of its own follows.
        own[2] = 0 if rng.random() < mix.identical_share else max(1, own[2] - shared)
        segments = _clip([[GROUP_TAG_BASE + group, 0, shared], own], args["max_model_len"] - 1)
        return segments, group, shared
    return _clip([own], args["max_model_len"] - 1), "", 0


def _follow_up(rng: np.random.Generator, args: dict[str, Any], earlier: list[Spec], own: list[int]) -> Segments:
    """An earlier prompt, its reply (now and then only its beginning), and something new of a fifth of the length."""
    which = max(0, len(earlier) - 1 - int(rng.geometric(0.1)))
    before = earlier[which]
    reply = min(before["output_tokens"], args["max_model_len"] - _tokens(before["prompt"]))
    reply = max(1, reply // 2) if rng.random() < 0.2 else reply
    new = 0 if rng.random() < 0.2 else max(1, own[2] // 5)
    return _drop_empty([*before["prompt"], [GENERATED_TAG_BASE + which, 0, reply], [own[0], 0, new]])


def _output_tokens(rng: np.random.Generator, args: dict[str, Any], mix: Mix) -> int:
    if rng.random() < mix.one_token_share:
        return 1
    if rng.random() < mix.unlimited_output_share:
        # Runs into max_model_len; bounded, since long outputs make many steps.
        return min(2 * args["max_model_len"], 300)
    return _length(rng, mix.output_mean)


def _length(rng: np.random.Generator, mean: float) -> int:
    """At least 1, half of it spread exponentially, so that short and long ones occur."""
    return max(1, int(mean * (0.5 + 0.5 * rng.exponential())))


def _clip(segments: Segments, tokens: int) -> Segments:
    clipped, left = [], tokens
    for tag, start, n in segments:
        clipped.append([tag, start, min(n, left)])
        left -= clipped[-1][2]
    return _drop_empty(clipped)


def _drop_empty(segments: Segments) -> Segments:
    return [segment for segment in segments if segment[2]]


def _tokens(segments: Segments) -> int:
    return sum(n for _, _, n in segments)


def most_blocks(requests: list[Spec], args: dict[str, Any]) -> int:
    """Blocks that the largest request needs at its end: a pool below that never finishes."""
    most = max(min(_tokens(r["prompt"]) + r["output_tokens"], args["max_model_len"]) - 1 for r in requests)
    return max(1, math.ceil(most / args["block_size"]))


def _pick(rng: np.random.Generator, choices: list[Any]) -> Any:
    return choices[int(rng.integers(0, len(choices)))]


def make_spec(name: str, description: str, args: dict[str, Any], b_ns: list[int], requests: list[Spec]) -> Spec:
    """The spec of a workload, as `oracle_record.read_spec` describes it."""
    return {
        "scenario": name,
        "description": description,
        "engine_args": args,
        "step_time": {"b_ns": b_ns},
        "requests": requests,
    }


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
