"""The scheduling kernel: vLLM V1 over arrays, compiled.

Modules that read as the sections of the semantics they implement: ``state`` (what a run is
made of), ``free_queue`` and ``pool`` (blocks, eviction and prefix cache, sections 4 and 6),
``queues`` (waiting and running order, and who leaves, section 8), ``batch`` (what enters a step's batch, who
gives its blocks up, and what it leads to, section 5), ``schedule`` (one ``schedule()`` call, sections 2 and 3) and
``loop`` (the engine loop, sections 1, 7 and 9); ``drafting`` has the last two for speculative
decoding.  ``step_time`` says how long a batch takes.

May import: base.
"""
