"""TraceV2 of a recording: sent and answered as recorded where its clock allows, else counted from 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import ARRIVALS, Recording
from blis_replay.replay.blis_files import TRACE_FORMS, prefix_groups, trace_rows, write_rows
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import request_trace

FILES = ("trace.yaml", "trace.csv")
COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us", "status", "error")
# The first is read by the most builds.
_FORM = TRACE_FORMS[0]
ENGINE = ("max_num_seqs", "block_size", "max_model_len")


def write(recording: Recording, folder: Path) -> list[str]:
    """Write ``trace.yaml`` and ``trace.csv``; returns what was lost beside whole columns, in words.

    Mode is ``real`` where stamps are of the epoch and every request that was served has its
    end, ``generated`` else.  Prefixes are groups of requests, as BLIS knows them.  Raises
    ``ReplayError`` as ``request_trace`` does.
    """
    trace, _basis = request_trace(recording, ReplayMode())
    zero_us = _epoch_zero_us(recording)
    server = {name: recording.engine[name].value for name in ENGINE if name in recording.engine}
    named = {"model": recording.model, "tensor_parallel": recording.tensor_parallelism}
    server |= {name: value for name, value in named.items() if value is not None}
    fields = {"mode": "generated" if zero_us is None else "real", "server": {"type": "vllm", **server}}
    write_rows(_FORM, fields, _rows(recording, trace, zero_us or 0), folder / FILES[0], folder / FILES[1])
    return _lost(recording, zero_us)


def _epoch_zero_us(recording: Recording) -> int | None:
    """What the clock of ``real`` stamps shows at the experiment's zero, None where there are no such stamps."""
    served = recording.requests.filter(pl.col("status") == "ok")
    if recording.ground_truth == ARRIVALS or served["e2e_us"].null_count():
        return None
    return next((c.zero_us for c in recording.clocks if c.name in ("client", "server") and c.kind == "epoch"), None)


def _rows(recording: Recording, trace: RequestTrace, zero_us: int) -> Iterator[dict[str, object]]:
    groups = prefix_groups(trace, int(recording.engine["block_size"].value))
    recorded = recording.requests.select("ttft_us", "e2e_us", "status", "error").iter_rows()
    for row, (ttft_us, e2e_us, status, error) in zip(
        trace_rows(trace, groups, trace.output_tokens, _FORM), recorded, strict=True
    ):
        sent_us = zero_us + int(str(row["arrival_time_us"]))
        yield row | {
            "model": recording.model or "",
            "send_time_us": sent_us,
            "first_chunk_time_us": 0 if ttft_us is None or e2e_us is None else sent_us + ttft_us,
            "last_chunk_time_us": 0 if e2e_us is None else sent_us + e2e_us,
            "status": "incomplete" if status == "aborted" else status,
            "error_message": error or "",
        }


def _lost(recording: Recording, zero_us: int | None) -> list[str]:
    requests = recording.requests
    failed = requests.filter(pl.col("status") != "ok")["output_tokens"].count()
    unknown = requests["prompt_tokens"].null_count()
    half = requests.filter(pl.col("e2e_us").is_null())["ttft_us"].count()
    shared = recording.prefix is not None or recording.shared_prefix is not None
    said = {
        "the epoch of the clock": zero_us is None and any(clock.kind == "epoch" for clock in recording.clocks),
        f"output_tokens of {failed} failed requests": failed > 0,
        f"that prompt_tokens of {unknown} requests are not known (estimated)": unknown > 0,
        f"ttft_us of {half} requests without e2e_us": half > 0,
        "prefixes beyond one group a request": shared,
    }
    return [words for words, true in said.items() if true]
