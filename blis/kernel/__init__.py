"""The scheduling kernel: vLLM V1 over arrays, compiled.

Each module implements sections of the scheduler's semantics (research/engine.md):

- ``state``: what a run is made of.
- ``free_queue``, ``pool``: blocks, eviction and prefix cache (sections 4 and 6).
- ``queues``: waiting and running requests, and how they leave (section 8).
- ``batch``: what enters a step's batch, and preemption (section 5).
- ``schedule``: one ``schedule()`` call (sections 2 and 3).
- ``loop``: the engine loop (sections 1, 7 and 9).
- ``drafting``: schedule and loop with speculative decoding.
- ``offloading``, ``transfers``: schedule and loop with an offload to CPU memory, and what goes there and back.
- ``step_time``: how long a batch takes.

May import: base.
"""
