"""The scheduler semantics without KV limits, request by request and token by token.

Written from the sections of the semantics document for tests only: slow, with lists,
sharing nothing with the kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

NEVER = 2**62


@dataclass
class Request:
    """A request with its progress; ``token_us`` collects the times of its tokens."""

    arrival_us: int
    prompt_tokens: int
    prefill_tokens: int
    output_tokens: int
    abort_us: int = NEVER
    computed: int = 0  # of the prefill, then of the tokens in flight
    in_flight: int = 0  # tokens scheduled and not yet in
    token_us: list[int] = field(default_factory=list)
    scheduled_us: int = -1
    aborted: bool = False

    @property
    def wanted(self) -> int:
        """Tokens it asks for in the next batch (sections 2a, 7 and 9)."""
        if self.computed < self.prefill_tokens:
            return self.prefill_tokens - self.computed
        return 1 if len(self.token_us) + self.in_flight < self.output_tokens else 0

    @property
    def done(self) -> bool:
        return len(self.token_us) == self.output_tokens


def serve(
    requests: list[Request],
    max_num_seqs: int,
    budget: int,
    batches_in_flight: int,
    step_us: Callable[[int, int, int], int],
) -> None:
    """Run the engine loop; results are left in the requests."""
    pending = deque(sorted(requests, key=lambda r: r.arrival_us))
    waiting: deque[Request] = deque()
    running: list[Request] = []
    flying: deque[tuple[int, list[Request]]] = deque()  # end, requests that get a token
    now = device_free = 0
    while True:
        while pending and pending[0].arrival_us <= now:
            request = pending.popleft()
            if not request.aborted:
                waiting.append(request)
        for request in requests:
            if request.abort_us <= now and not request.aborted and not request.done:
                request.aborted = True
                if request in waiting:
                    waiting.remove(request)
                if request in running:
                    running.remove(request)
        if running or waiting:
            left, prefill, decode, context, getting = budget, 0, 0, 0, []
            admitted = list(running)
            position = 0
            while position < len(admitted) or (waiting and left > 0 and len(running) < max_num_seqs):
                if position == len(admitted):
                    request = waiting.popleft()
                    request.scheduled_us = now
                    running.append(request)
                    admitted.append(request)
                request = admitted[position]
                position += 1
                tokens = min(request.wanted, left)
                if tokens == 0:
                    continue
                left -= tokens
                if request.computed < request.prefill_tokens:
                    prefill += tokens
                    request.computed += tokens
                    if request.computed < request.prefill_tokens:
                        continue
                else:
                    decode += 1
                    context += request.prompt_tokens + len(request.token_us) + request.in_flight
                request.in_flight += 1
                getting.append(request)
            end = max(now, device_free)
            if prefill + decode:
                end += step_us(prefill, decode, context)
                device_free = end
            flying.append((end, getting))
            if prefill + decode and len(flying) < batches_in_flight:
                continue
        elif not flying:
            if not pending:
                return
            now = max(now, pending[0].arrival_us)
            continue
        end, getting = flying.popleft()
        now = max(now, end)
        for request in getting:
            request.in_flight -= 1
            if not request.aborted:
                request.token_us.append(end)
                if request.done:
                    running.remove(request)
