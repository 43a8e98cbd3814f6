"""What goes from a server that prefills to one that decodes, what it costs, and the parts of a TTFT that it makes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import UnreplayableError
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.recording import Recording

PARTS = ("client", "queue", "prefill", "hand_over", "load", "first_step")


@dataclass(frozen=True)
class TransferCosts:
    """How KV blocks come from the producer to the consumer, us.

    ``hand_over_us``: from the end of a request in the producer's engine to the consumer's queue, whatever proxy is
    between.  A load of n blocks takes ``load_us + n * load_block_us``, one load after the other.
    """

    hand_over_us: int
    load_us: int
    load_block_us: int


def given_costs(text: str) -> dict[str, int]:
    """Costs as a user writes them: ``hand_over_us=8000 load_us=300 load_block_us=40``, or some of these.

    Raises ``UnreplayableError`` for anything else.
    """
    known = [field.name for field in fields(TransferCosts)]
    words = [word.partition("=") for word in text.split()]
    for name, _, value in words:
        if name not in known or not (value.isascii() and value.isdigit() and len(value) < 10):
            raise UnreplayableError(f"{name}={value} is not a cost of a transfer; give {', '.join(known)} in whole us")
    names = [name for name, _, _ in words]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UnreplayableError(f"{twice} is given {names.count(twice)} times; give it once")
    return {name: int(value) for name, _, value in words}


@dataclass(frozen=True)
class Apart:
    """What came of a pair.

    ``producer``: its run, on the clock of the pair, with its ``engine``; ``row``: int64[n], the producer's request of
    each of the consumer's, -1: it never came there.  ``costs``: of the transfers, and the names of those that were
    ``fitted`` on this pair.  ``turns``: simulations of the producer.  ``observed_us``: as ``parts_us``, recorded.
    ``by_itself``: whether requests were in the consumer's queue when it was recorded, whatever a hand-over takes.
    """

    prefill: Recording
    producer: SimResult
    engine: EngineConfig
    row: Int64s
    costs: TransferCosts
    fitted: tuple[str, ...]
    turns: int
    observed_us: dict[str, Floats]
    by_itself: bool = False

    @property
    def used(self) -> dict[str, int]:
        """The costs that the replay rests on, by name."""
        unused = "hand_over_us" if self.by_itself and "hand_over_us" not in self.fitted else ""
        return {name: us for name, us in vars(self.costs).items() if name != unused}

    def parts_us(self, consumer: SimResult) -> dict[str, Floats]:
        """float64[n] by ``PARTS``: what the simulated TTFT of each request consists of, us; nan where it has none."""
        first = [getattr(self.producer, name)[self.row] for name in ("queued_us", "scheduled_us", "finished_us")]
        then = [consumer.queued_us, consumer.scheduled_us, consumer.first_token_us]
        return parts_of(np.where(consumer.completed, consumer.ttft_us, np.nan), [*first, *then])

    def named(self, mode: str) -> str:
        """What identifies a replay in this mode: who prefilled, and the costs that were given."""
        given = [f"{name}={us}" for name, us in self.used.items() if name not in self.fitted]
        return " ".join([*([] if mode == "exact" else [mode]), f"prefill={self.prefill.alias}", *given])

    def in_words(self) -> str:
        """One line for people."""
        costs = " ".join(f"{name}={us}" for name, us in self.used.items())
        fitted = f" ({', '.join(self.fitted)} fitted on this pair)" if self.fitted else ""
        return f"{self.prefill.alias} prefills, simulated in {self.turns} turns; {costs}{fitted}"


def parts_of(ttft_us: Floats, stamps: list[Int64s] | list[Floats]) -> dict[str, Floats]:
    """The parts by ``stamps``: queued, scheduled and finished at the producer; queued, scheduled, first token after it.

    The client's part is what no engine accounts for, there and back.
    """
    inside = np.diff(np.array(stamps, np.float64), axis=0)
    rows = [ttft_us - inside.sum(axis=0), *(inside + 0 * ttft_us)]
    return dict(zip(PARTS, rows, strict=True))
