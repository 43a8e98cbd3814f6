"""Write the requests of a recording for other simulators: all files or none, and the names of what is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import polars as pl

from blis_replay.base.errors import ReplayError, exists_already
from blis_replay.base.files import naming, whole_files
from blis_replay.blis.trace import BlockKeys, RequestTrace
from blis_replay.ingest.recording import ARRIVALS, RECORDED, REQUEST_SCHEMA, PromptTree, Recording
from blis_replay.replay.blis_files import prefix_groups, trace_rows, write_rows
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import request_trace
from blis_replay.replay.prefix import recorded_block_keys


def lost_of_arrivals(recording: Recording, trace: RequestTrace) -> list[str]:
    """What a format of arrivals loses of a recording besides whole columns, in words."""
    unknown = recording.requests["prompt_tokens"].null_count()
    losses = {
        f"that prompt_tokens of {unknown} requests are not known (estimated)": unknown > 0,
        "prefix-cache hits, which are known as numbers only": bool((trace.prefill_tokens < trace.prompt_tokens).any()),
    }
    return [words for words, true in losses.items() if true]


MOONCAKE_COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens")
BLOCK_TOKENS = 512


def write_mooncake(recording: Recording, folder: Path) -> list[str]:
    """Write ``requests.jsonl``; returns what was lost besides whole columns, in words.

    Timestamps are in ms, with decimals only where needed.  Ids count from 0; equal
    blocks of 512 tokens have equal ids.  Without known identities ``hash_ids`` is left out.

    Raises ``ReplayError`` as ``request_trace`` does.
    """
    trace, _basis = request_trace(with_engine(recording, {"block_size": BLOCK_TOKENS}, "file"), ReplayMode())
    identities = recording.prefix
    keys = trace.block_keys if identities is None else recorded_block_keys(identities, len(trace), BLOCK_TOKENS)
    ids = ([] for _ in range(len(trace))) if keys is None else _ids(keys, trace)
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for i, hash_ids in enumerate(ids):
            whole, part = divmod(int(trace.arrival_us[i]), 1000)
            line: dict[str, object] = {
                "timestamp": whole + part / 1000 if part else whole,
                "input_length": int(trace.prompt_tokens[i]),
                "output_length": int(trace.output_tokens[i]),
            }
            file.write(json.dumps(line | ({"hash_ids": hash_ids} if hash_ids else {})) + "\n")
    lost = lost_of_arrivals(recording, trace)
    if keys is not None and not (identities and _in_blocks(identities)):
        lost.append(f"prefixes that end within a block of {BLOCK_TOKENS} tokens")
    return lost


def _in_blocks(tree: PromptTree) -> bool:
    """Whether shared parts of prompts end at block boundaries of this format."""
    return bool((tree.prompts.select("shared_tokens", "tokens").to_numpy() % BLOCK_TOKENS == 0).all())


def _ids(keys: BlockKeys, trace: RequestTrace) -> Iterator[list[int]]:
    """Ids of the blocks of each prompt, with the last partial one: its keys, then unique ids.

    A prompt without any key has no ids.
    """
    fresh = count(int(keys.keys.max(initial=-1)) + 1)
    for i, prompt_tokens in enumerate(trace.prompt_tokens.tolist()):
        blocks = -(-prompt_tokens // BLOCK_TOKENS) if keys.count[i] else 0
        known = keys.keys[keys.start[i] : keys.start[i] + min(keys.count[i], blocks)].tolist()
        yield [*known, *(next(fresh) for _ in range(blocks - len(known)))]


FILES = ("trace.yaml", "trace.csv")
TRACEV2_COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us", "status", "error")
ENGINE = ("max_num_seqs", "block_size", "max_model_len")


def write_tracev2(recording: Recording, folder: Path) -> list[str]:
    """Write ``trace.yaml`` and ``trace.csv``; returns what was lost besides whole columns, in words.

    The mode is ``real`` if timestamps are of the epoch and every served request has an end, else ``generated``.
    Prefixes become groups of requests, as BLIS has them.  Raises ``ReplayError`` as ``request_trace`` does.
    """
    trace, _basis = request_trace(recording, ReplayMode())
    zero_us = _epoch_zero_us(recording)
    server = {name: recording.engine[name].value for name in ENGINE if name in recording.engine}
    named = {"model": recording.model, "tensor_parallel": recording.tensor_parallelism}
    server |= {name: value for name, value in named.items() if value is not None}
    fields = {"mode": "generated" if zero_us is None else "real", "server": {"type": "vllm", **server}}
    write_rows(fields, _rows(recording, trace, zero_us or 0), folder / FILES[0], folder / FILES[1])
    return _lost(recording, zero_us)


def _epoch_zero_us(recording: Recording) -> int | None:
    """The epoch time of the experiment's zero in us; None if the mode cannot be ``real``."""
    served = recording.requests.where("status = 'ok'")
    if recording.ground_truth == ARRIVALS or not served.where("e2e_us IS NULL").is_empty():
        return None
    return next((c.zero_us for c in recording.clocks if c.name in ("client", "server") and c.kind == "epoch"), None)


def _rows(recording: Recording, trace: RequestTrace, zero_us: int) -> Iterator[dict[str, object]]:
    groups = prefix_groups(trace, int(recording.engine["block_size"].value))
    recorded = recording.requests.select("ttft_us", "e2e_us", "status", "error").iter_rows()
    for row, (ttft_us, e2e_us, status, error) in zip(
        trace_rows(trace, groups, trace.output_tokens), recorded, strict=True
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
    failed = requests.where("status <> 'ok' AND output_tokens IS NOT NULL").height
    unknown = requests.where("prompt_tokens IS NULL").height
    half = requests.where("e2e_us IS NULL AND ttft_us IS NOT NULL").height
    shared = recording.prefix is not None or recording.shared_prefix is not None
    losses = {
        "the epoch of the clock": zero_us is None and any(clock.kind == "epoch" for clock in recording.clocks),
        f"output_tokens of {failed} failed requests": failed > 0,
        f"that prompt_tokens of {unknown} requests are not known (estimated)": unknown > 0,
        f"ttft_us of {half} requests without e2e_us": half > 0,
        "prefixes beyond one group a request": shared,
    }
    return [words for words, true in losses.items() if true]


# Columns that the order of the rows carries.
_TOLD_BY_ORDER = ("request_index",)


@dataclass(frozen=True)
class ExportTarget:
    """A format to export to.

    ``suffix``: of the file, or of the folder if there are several ``files``.  ``write(recording, folder)``: writes
    ``files`` into ``folder``; returns what was lost besides whole columns.  ``columns``: those of ``REQUEST_SCHEMA``
    that it carries.  ``lengths``: the source of output lengths that its reader assumes (``OUTPUT_LENGTH_SOURCES``).
    ``engine``: the engine arguments that it carries.
    """

    suffix: str
    files: tuple[str, ...]
    write: Callable[[Recording, Path], list[str]]
    columns: tuple[str, ...]
    lengths: str = "server usage"
    engine: tuple[str, ...] = ()


TARGETS: dict[str, ExportTarget] = {
    "tracev2": ExportTarget(
        "-tracev2",
        FILES,
        write_tracev2,
        TRACEV2_COLUMNS,
        lengths="re-tokenised",
        engine=ENGINE,
    ),
    "mooncake": ExportTarget(".jsonl", ("requests.jsonl",), write_mooncake, MOONCAKE_COLUMNS),
}


@dataclass(frozen=True)
class Exported:
    """The files of an export; ``not_carried``: parts of the recording that the format lacks, in words."""

    files: tuple[Path, ...]
    requests: int
    not_carried: tuple[str, ...]


def export(recording: Recording, target: str, out: Path | None = None, force: bool = False) -> Exported:
    """Write the requests of a recording as ``target`` (one of ``TARGETS``) to a file or folder ``out``.

    The default of ``out`` is the alias, in the current folder.  Files are renamed into place when complete.  Raises
    ``FileExistsAlreadyError`` unless ``force``, ``ReplayError`` if the recording has no requests or no lengths,
    ``OSError`` if the folder cannot be written.
    """
    if recording.requests.height == 0:
        raise ReplayError(f"{recording.slug}: the recording has no requests to export; ingest its per-request records")
    form = TARGETS[target]
    out = out or Path(recording.alias + form.suffix)
    final = [out / name for name in form.files] if len(form.files) > 1 else [out]
    for path in final:
        if os.path.lexists(path) and not force:
            raise exists_already(path)
    with naming(out), whole_files(final[0].parent) as scratch:
        lost = form.write(recording, scratch)
        for name, path in zip(form.files, final, strict=True):
            (scratch / name).replace(scratch / path.name)
    return Exported(tuple(final), recording.requests.height, (*lost, *_not_carried(recording, form)))


def _not_carried(recording: Recording, form: ExportTarget) -> list[str]:
    """Columns that a reader of the export cannot recover, and parts of the recording besides requests."""
    requests = recording.requests.frame().with_columns(
        # Values that a reader assumes.
        pl.col("status").replace("ok", None),
        pl.col("output_tokens_source").replace(form.lengths, None),
        pl.when(pl.col("output_tokens_reported").ne_missing(pl.col("output_tokens"))).then("output_tokens_reported"),
    )
    known = [name for name in REQUEST_SCHEMA if requests[name].count()]
    lost = [name for name in known if name not in (*form.columns, *_TOLD_BY_ORDER)]
    given = {name for name, setting in recording.engine.items() if setting.said}
    beside = {
        "token times": recording.ground_truth == RECORDED and "token times" not in recording.missing,
        "step records": recording.steps.height > 0,
        "load stages": len(recording.stages) > 0,
        f"engine arguments {', '.join(sorted(given - set(form.engine)))}": not given <= set(form.engine),
    }
    return [*lost, *(name for name, there in beside.items() if there)]
