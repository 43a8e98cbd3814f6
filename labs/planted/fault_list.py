"""The list of planted faults: what the scoreboard of ``blis-replay verify --faults`` is about.

Each part was written before any fix for its sake: whoever adds a diagnosis adds the faults first.
"""

from __future__ import annotations

from blis_replay_labs.planted import causes as c
from blis_replay_labs.planted.faults import Cause, Depth, Fault


def _one(group: str, cause: Cause, depth: Depth = "full", load: str = "two levels", *, decidable: bool = True) -> Fault:
    return Fault(group, (cause,), depth, load, decidable)


def _two(first: Cause, second: Cause, depth: Depth = "full", load: str = "two levels") -> Fault:
    return Fault("two at once", (first, second), depth, load)


def _live(alias: str, cause: Cause | tuple[Cause, ...], depth: Depth = "full") -> Fault:
    return Fault("live recordings", cause if isinstance(cause, tuple) else (cause,), depth, alias)


_BOTH: tuple[Depth, ...] = ("full", "client")
_PROMPTS, _BURSTS, _LENGTHS, _CROWDS = "long prompts", "bursts", "other lengths", "crowds"

FAULTS: tuple[Fault, ...] = (
    # What was recorded.
    *(_one("recording", c.missing(share)) for share in (0.03, 0.1, 0.3)),
    *(_one("recording", c.missing(share), "steps") for share in (0.1, 0.3)),
    _one("recording", c.missing(0.2), "client", decidable=False),
    *(_one("recording", c.cut_off(share)) for share in (0.3, 0.6)),
    *(_one("recording", c.twice(share)) for share in (0.05, 0.2)),
    _one("recording", c.twice(0.2), "client"),
    _one("recording", c.foreign_steps()),
    _one("recording", c.foreign_steps(), "steps"),
    # Clocks.
    *(_one("clock", c.step_clock(us), "steps") for us in (2_000_000, -2_000_000, 500_000)),
    _one("clock", c.step_clock(0, 0.02), "steps"),
    *(_one("clock", c.server_clock(us)) for us in (2_000_000, -2_000_000, 100_000)),
    _one("clock", c.late_sends(20_000)),
    _one("clock", c.late_sends(20_000), "client", decidable=False),
    _one("clock", c.coarse_sends(1_000_000)),
    # Load.
    _one("load", c.mode("arrivals", "arrivals=flat"), "full", _BURSTS),
    _one("load", c.mode("arrivals", "arrivals=flat"), "client", _BURSTS),
    _one("load", c.mode("output lengths", "lengths=re-tokenised")),
    _one("load", c.mode("output lengths", "lengths=re-tokenised"), "client", _LENGTHS),
    _one("load", c.believed_ignore_eos(), "full", _LENGTHS),
    _one("load", c.believed_ignore_eos(), "steps", _LENGTHS),
    _one("load", c.believed_ignore_eos(), "client", _LENGTHS),
    _one("load", c.short_prompts(0.4), "full", _PROMPTS),
    # Engine arguments: what the server runs with is not what the recording says.
    *(_one("engine arguments", c.argument("max_num_seqs", n, 128)) for n in (4, 8)),
    _one("engine arguments", c.argument("max_num_seqs", 8, 128), "steps"),
    _one("engine arguments", c.argument("max_num_seqs", 8, 128), "client"),
    _one("engine arguments", c.argument("max_num_seqs", 16, 128), "full", _BURSTS),
    _one("engine arguments", c.argument("max_num_seqs", 128, 8)),
    *(_one("engine arguments", c.argument("max_num_batched_tokens", n, 2048), "full", _PROMPTS) for n in (128, 256)),
    _one("engine arguments", c.argument("max_num_batched_tokens", 256, 2048), "client", _PROMPTS),
    *(_one("engine arguments", c.blocks(n, 1301)) for n in (150, 250)),
    *(_one("engine arguments", c.blocks(n, None)) for n in (150, 250)),
    _one("engine arguments", c.blocks(150, None), "steps"),
    _one("engine arguments", c.blocks(150, None), "client"),
    *(_one("engine arguments", c.scheduling(asynchronous=on)) for on in (False, True)),
    _one("engine arguments", c.scheduling(asynchronous=False), "steps"),
    *(_one("engine arguments", c.scheduling(asynchronous=on), "client") for on in (False, True)),
    _one("engine arguments", c.argument("long_prefill_token_threshold", 64, 0), "full", _PROMPTS),
    # Cache.
    *(_one("cache", c.cache(on=False), depth) for depth in ("full", "steps", "client")),
    _one("cache", c.cache(on=True)),
    _one("cache", c.cache(on=True), "client"),
    _one("cache", c.cache(on=False), "full", _PROMPTS),
    _one("cache", c.mode("prefix cache", "prefix=none")),
    # Scheduler.
    _one("scheduler", c.mode("scheduling mode", "scheduling=synchronous")),
    _one("scheduler", c.mode("scheduling mode", "scheduling=synchronous"), "client"),
    # Step time.
    *(_one("step time", c.line(intercept=by)) for by in (0.8, 1.1, 1.25, 1.5)),
    *(_one("step time", c.line(intercept=1.25), depth) for depth in ("steps", "client")),
    *(_one("step time", c.line(per_decode_token=by)) for by in (0.3, 3.0)),
    _one("step time", c.line(per_decode_token=3.0), "client"),
    *(_one("step time", c.line(per_prefill_token=by), "full", _PROMPTS) for by in (0.3, 2.0)),
    _one("step time", c.context_cost(400)),
    _one("step time", c.slow_window(6_000)),
    # Delays.
    *(_one("delays", c.delay(c.PRE_QUEUE, pre_queue_us=us)) for us in (3_000, 12_000, 40_000, -4_000)),
    _one("delays", c.delay(c.PRE_QUEUE, pre_queue_us=12_000), "client", decidable=False),
    _one("delays", c.delay(c.PRE_QUEUE, pre_queue_per_prompt_token_us=10)),
    # Output.
    *(_one("output", c.delay(c.OUTPUT, post_token_us=us)) for us in (400, 1_000)),
    *(_one("output", c.delay(c.OUTPUT, post_request_us=us)) for us in (50_000, 200_000)),
    _one("output", c.delay(c.OUTPUT, post_request_us=200_000), "client"),
    *(_one("output", c.role_chunk(1.0), depth) for depth in ("full", "steps", "client")),
    _one("output", c.role_chunk(0.3), "client"),
    # Simulator: runs with other arguments.
    _one("simulator", c.mode("engine arguments", "max_num_seqs=6", *c.ARGUMENTS)),
    _one("simulator", c.mode("engine arguments", "max_num_batched_tokens=128", *c.ARGUMENTS), "full", _PROMPTS),
    _one("simulator", c.mode("engine arguments", "num_gpu_blocks=150", *c.ARGUMENTS)),
    _one("simulator", c.mode("prefix cache", "enable_prefix_caching=false", "prefix cache", *c.ARGUMENTS)),
    # Coefficients: of another GPU, without a cost, in the wrong unit.
    _one("coefficients", c.line(intercept=2.0, per_prefill_token=2.0, per_decode_token=2.0)),
    _one("coefficients", c.line(intercept=0.5, per_prefill_token=0.5, per_decode_token=0.5)),
    _one("coefficients", c.line(per_decode_token=0.0)),
    _one("coefficients", c.line(per_prefill_token=0.001), "full", _PROMPTS),
    # Two at once.
    _two(c.line(intercept=1.25), c.delay(c.PRE_QUEUE, pre_queue_us=12_000)),
    _two(c.line(intercept=1.25), c.delay(c.OUTPUT, post_request_us=200_000)),
    _two(c.line(intercept=1.2, per_decode_token=0.3), c.delay(c.PRE_QUEUE, pre_queue_us=12_000)),
    _two(c.cache(on=False), c.line(intercept=1.2)),
    _two(c.cache(on=False), c.delay(c.PRE_QUEUE, pre_queue_us=12_000)),
    _two(c.argument("max_num_seqs", 8, 128), c.line(intercept=1.25)),
    _two(c.argument("max_num_seqs", 8, 128), c.cache(on=False)),
    _two(c.blocks(150, None), c.line(intercept=0.8)),
    _two(c.scheduling(asynchronous=False), c.line(intercept=1.2)),
    _two(c.missing(0.1), c.line(intercept=1.2)),
    _two(c.role_chunk(1.0), c.line(intercept=1.25)),
    _two(c.server_clock(2_000_000), c.line(intercept=1.25)),
    _two(c.believed_ignore_eos(), c.line(intercept=1.2), "full", _LENGTHS),
    # Planted later, to find what fails.
    *(
        _one("recording", cause, depth)
        for cause in (c.missing_between(10_000_000, 3_000_000), c.every_other())
        for depth in _BOTH
    ),
    _one("recording", c.twice(0.5), "client"),
    *(_one("clock", c.polling_client(100_000), depth) for depth in _BOTH),
    _one("cache", c.warm_cache(), "client"),
    *(_one("output", c.slow_client(2_000), depth) for depth in _BOTH),
    *(_one("step time", c.stood_still(3_000_000), depth) for depth in _BOTH),
    *(_one("coefficients", c.other_machine(0.45, 6.0, 3.0), depth) for depth in _BOTH),
    _one("coefficients", c.other_machine(1.6, 1.9, 1.1)),
    *(_two(c.argument("max_num_seqs", 12, 64), c.line(per_decode_token=2.0), depth, _BURSTS) for depth in _BOTH),
    *(_two(c.blocks(200, 1301), c.delay(c.PRE_QUEUE, pre_queue_us=30_000), depth) for depth in _BOTH),
    *(_two(c.scheduling(asynchronous=False), c.delay(c.OUTPUT, post_token_us=500), depth) for depth in _BOTH),
    _two(c.cache(on=False), c.argument("max_num_seqs", 10, 128), "client"),
    # How a server is run and watched.
    *(_one("operation", c.unchunked(), depth, _CROWDS) for depth in _BOTH),
    _one("operation", c.priorities(), "full", _CROWDS),
    _one("operation", c.priorities(), "client", _CROWDS, decidable=False),
    *(_one("operation", c.argument("data_parallel_size", 2, 1), depth, _BURSTS) for depth in _BOTH),
    *(_one("operation", c.speculation(0.6), depth) for depth in _BOTH),
    *(_one("operation", c.tensor_parallelism(2, 1), depth) for depth in _BOTH),
    *(_one("operation", c.other_revision(), depth) for depth in ("full", "steps")),
    _one("operation", c.other_revision(), "client", decidable=False),
    *(_one("operation", c.fp8_cache(400, 200), depth) for depth in _BOTH),
    *(_one("operation", c.disturbed("power cap", 2_500), depth) for depth in _BOTH),
    *(_one("operation", c.disturbed("another process on the GPU", 8_000), depth) for depth in _BOTH),
    *(_one("operation", c.disturbed("another model on the GPU", 4_000), depth) for depth in _BOTH),
    *(_one("operation", c.second_client(), depth) for depth in ("full", "steps")),
    _one("operation", c.second_client(), "client", decidable=False),
    _one("operation", c.timeouts_dropped(0.1)),
    _one("operation", c.timeouts_dropped(0.1), "client", decidable=False),
    *(_one("operation", c.begun_late(15), depth, _PROMPTS) for depth in _BOTH),
    *(_one("operation", c.buffering_proxy(100_000), depth) for depth in _BOTH),
    *(_one("operation", c.later_token_stamped(), depth) for depth in ("full", "steps", "client")),
    *(_one("operation", c.wrong_unit(), depth) for depth in _BOTH),
    _one("operation", c.connecting(30_000)),
    _one("operation", c.connecting(30_000), "client", decidable=False),
    _one("operation", c.slow_front_end(0.1, 400_000)),
    _one("operation", c.slow_front_end(0.1, 400_000), "client", decidable=False),
    _one("operation", c.gateway(500_000)),
    _one("operation", c.gateway(500_000), "client", decidable=False),
    *(_one("operation", c.drifting_server(ppm)) for ppm in (2_000, 20_000)),
    *(_one("operation", c.stepped_server(20_000_000, us)) for us in (1_000_000, -1_000_000)),
    _one("operation", c.stepped_client(20_000_000, 1_500_000)),
    _one("operation", c.stepped_client(20_000_000, 1_500_000), "client", decidable=False),
    *(_one("operation", c.time_zone(hours)) for hours in (2, -8)),
    *(_one("operation", c.lost_steps(10_000_000, 15_000_000), depth) for depth in ("full", "steps")),
    _one("operation", c.other_tokenizer(1.25), "full", _PROMPTS),
    _one("operation", c.other_tokenizer(1.25), "client", _PROMPTS, decidable=False),
    _one("operation", c.argument("max_num_batched_tokens", 512, 8192), "full", _CROWDS),
    _one("operation", c.argument("max_num_batched_tokens", 512, 8192), "client", _CROWDS),
    _one("operation", c.argument("long_prefill_token_threshold", 128, 0), "client", _CROWDS),
    _one("operation", c.blocks(150, 1301), "client"),
    _two(c.time_zone(2), c.disturbed("power cap", 2_500)),
    _two(c.second_client(), c.disturbed("power cap", 2_500)),
    *(_two(c.tensor_parallelism(2, 1), c.delay(c.PRE_QUEUE, pre_queue_us=12_000), depth) for depth in _BOTH),
    *(_two(c.connecting(30_000), c.argument("max_num_seqs", 8, 128), depth) for depth in _BOTH),
    *(_two(c.buffering_proxy(100_000), c.blocks(150, 1301), depth) for depth in _BOTH),
    _two(c.disturbed("another process on the GPU", 8_000), c.scheduling(asynchronous=False)),
    _two(c.timeouts_dropped(0.1), c.line(intercept=1.2)),
    # In recordings of a real vLLM.
    *(_live(f"tiny-live-{run}", c.every_step(1.1)) for run in "abde"),
    *(_live(f"tiny-live-{run}", c.every_step(0.9)) for run in "acde"),
    *(_live(f"tiny-live-{run}", c.every_step(1.25), "client") for run in "ab"),
    *(_live(f"tiny-live-{run}", c.slower_run(1.1)) for run in "ad"),
    *(_live(f"tiny-live-{run}", c.line(intercept=by)) for run in "ae" for by in (0.8, 1.25)),
    _live("tiny-live-a", c.line(per_prefill_token=2.0)),
    *(_live("tiny-live-e", c.argument("max_num_seqs", 4, 32), depth) for depth in _BOTH),
    *(_live(f"tiny-live-{run}", c.argument("max_num_seqs", 32, 4)) for run in "ab"),
    *(_live("tiny-live-d", c.blocks(24, stated), depth) for stated in (512, None) for depth in _BOTH),
    _live("tiny-live-a", c.blocks(512, 24)),
    _live("tiny-live-c", c.argument("max_num_batched_tokens", 1024, 128)),
    *(_live("tiny-live-b", c.cache(on=True), depth) for depth in _BOTH),
    *(_live(f"tiny-live-{run}", c.scheduling(asynchronous=False)) for run in "abd"),
    _live("tiny-live-a", c.scheduling(asynchronous=False), "client"),
    _live("tiny-live-b", c.mode("arrivals", "arrivals=flat")),
    *(_live(f"tiny-live-{run}", c.delay(c.PRE_QUEUE, pre_queue_us=40_000)) for run in "acd"),
    _live("tiny-live-a", c.delay(c.PRE_QUEUE, pre_queue_us=12_000)),
    *(_live(f"tiny-live-{run}", c.delay(c.OUTPUT, post_request_us=200_000)) for run in "ac"),
    _live("tiny-live-a", c.delay(c.OUTPUT, post_token_us=1_000)),
    *(_live(f"tiny-live-{run}", c.missing(share)) for run in "ad" for share in (0.1, 0.3)),
    _live("tiny-live-b", c.cut_off(0.3)),
    _live("tiny-live-a", c.twice(0.2)),
    *(_live(f"tiny-live-{run}", c.server_clock(2_000_000)) for run in "ad"),
    _live("tiny-live-b", c.late_sends(20_000)),
    _live("tiny-live-a", c.role_chunk(1.0)),
    _live("tiny-live-a", c.role_chunk(1.0), "client"),
    # The same of these.
    *(_live("tiny-live-e", (c.argument("max_num_seqs", 4, 32), c.every_step(1.15)), depth) for depth in _BOTH),
    _live("tiny-live-d", (c.blocks(24, None), c.delay(c.PRE_QUEUE, pre_queue_us=40_000))),
    _live("tiny-live-d", (c.blocks(24, 512), c.every_step(0.9)), "client"),
    _live("tiny-live-d", (c.scheduling(asynchronous=False), c.every_step(1.1))),
    *(_live("tiny-live-a", c.twice(0.5), depth) for depth in _BOTH),
    *(_live("tiny-live-a", c.missing_between(4_000_000, 1_500_000), depth) for depth in _BOTH),
    *(_live("tiny-live-a", c.every_other(), depth) for depth in _BOTH),
    *(_live("tiny-live-a", c.slow_client(3_000), depth) for depth in _BOTH),
    _live("tiny-live-a", c.polling_client(100_000), "client"),
    _live("tiny-live-a", c.other_machine(0.45, 6.0, 3.0), "client"),
    _live("tiny-live-b", c.other_machine(1.6, 1.9, 1.1)),
    _live("tiny-live-c", c.argument("max_num_batched_tokens", 1024, 4096)),
    _live("tiny-live-a2", c.every_step(1.1)),
    _live("tiny-live-a2", c.argument("max_num_seqs", 32, 3)),
    _live("tiny-live-a2", c.step_ids_again(20_000_000)),
    # The same of these.
    *(_live(f"tiny-live-{run}", c.time_zone(2)) for run in "be"),
    *(_live(f"tiny-live-{run}", c.stepped_server(15_000_000, 1_000_000)) for run in "ad"),
    _live("tiny-live-a", c.drifting_server(20_000)),
    _live("tiny-live-b", c.connecting(30_000)),
    _live("tiny-live-d", c.gateway(500_000)),
    _live("tiny-live-a", c.slow_front_end(0.1, 400_000)),
    *(_live("tiny-live-a", c.buffering_proxy(100_000), depth) for depth in _BOTH),
    _live("tiny-live-d", c.later_token_stamped()),
    *(_live(f"tiny-live-{run}", c.wrong_unit(), "client") for run in "ae"),
    *(_live(f"tiny-live-{run}", c.timeouts_dropped(0.1)) for run in "ab"),
    *(_live(f"tiny-live-{run}", c.second_client()) for run in "be"),
    _live("tiny-live-a", c.lost_steps(5_000_000, 9_000_000)),
    _live("tiny-live-c", c.tensor_parallelism(2, 1)),
    _live("tiny-live-e", c.other_revision()),
    _live("tiny-live-d", (c.time_zone(2), c.every_step(1.1))),
    _live("tiny-live-a", (c.second_client(), c.every_step(0.9))),
    # A server that has just started.
    *(_one("step time", c.stood_still(3_000_000, at_s=0), depth) for depth in _BOTH),
)
