"""The scheduling kernel: vLLM V1 over arrays, compiled.

Seven modules that read as the sections of the semantics they implement: ``state`` (what a
run is made of), ``pool`` (blocks and prefix cache, sections 4 and 6), ``queues`` (waiting
and running order, section 8), ``batch`` (tokens that enter a step's batch),
``preempt`` (who gives its blocks up), ``schedule`` (one ``schedule()`` call, sections 2, 3
and 5) and ``loop`` (the engine loop, sections 1, 7 and 9); ``step_time``, the eighth, says
how long a batch takes.
"""
