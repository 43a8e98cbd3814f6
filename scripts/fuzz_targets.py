"""What is fuzzed: each reader, the inputs it begins with, how they are changed, and the rules that hold for any input.

Nothing but ``RecordingError`` may leave a reader (``MalformedError`` the collector), in one line; what
was read and what was rejected must add up.  A broken rule is an ``AssertionError``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests/ingest/readers"))

import fuzz_seeds as seeds
import polars as pl
import test_otlp_scan
import test_otlp_scan_protobuf
from fuzz_mutations import (
    Mutator,
    mutated_bytes,
    mutated_file,
    mutated_json,
    mutated_message,
    mutated_protobuf,
    mutated_rows,
    mutated_table,
)

from blis_replay.ingest.collector.batches import Batch, MalformedError, batch_of
from blis_replay.ingest.collector.http_service import protobuf_of
from blis_replay.ingest.errors import RecordingError, printable
from blis_replay.ingest.readers import discovery
from blis_replay.ingest.readers.experiment_config import read_experiment_config
from blis_replay.ingest.readers.files import KEPT_REJECTIONS, RecordedFile
from blis_replay.ingest.readers.formats import REQUEST_FORMATS, RequestFormat
from blis_replay.ingest.readers.otlp.decode import read_record
from blis_replay.ingest.readers.otlp.journeys import on_zero
from blis_replay.ingest.readers.otlp.rows import BatchRows
from blis_replay.ingest.readers.otlp.traces import read_traces, trace_batches
from blis_replay.ingest.readers.requests import READ_SCHEMA, RequestsRead, in_send_order
from blis_replay.ingest.readers.server import iterations, kv_events, metrics
from blis_replay.ingest.readers.server import log as server_log
from blis_replay.ingest.readers.server.engine_settings import EngineEvidence, engine_of
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, STEP_SCHEMA, PromptTree
from blis_replay.ingest.rows import Scratch, no_rows

_LONGEST_LINE = 2_000


@dataclass(frozen=True)
class Target:
    """What is done with the bytes of an input, and how inputs are made: changed by ``mutators`` from ``seeds``."""

    run: Callable[[bytes, Path], None]
    seeds: Callable[[], list[bytes]]
    mutators: tuple[Mutator, ...]


@contextmanager
def _complaint() -> Iterator[None]:
    """What a user may read: one line of printable text."""
    try:
        yield
    except (RecordingError, MalformedError) as error:
        _check_line(str(error))


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


def _check_line(text: str) -> None:
    _check(text, "an empty line")
    _check(text == printable(text), f"not printable: {text!r}")
    _check(len(text) < _LONGEST_LINE, f"a line of {len(text)} characters")


def _check_tally(file: RecordedFile) -> None:
    tally = file.tally
    _check(tally.records >= 0, "a negative number of records")
    _check(len(tally.rejected) == min(tally.rejected_count, KEPT_REJECTIONS), "rejections that are not in words")
    for place, reason in tally.rejected:
        _check_line(f"{place}: {reason}")
        _check(place, "a rejection without a place")
        _check(reason, "a rejection without a reason")
    _check(file.source("kind").bytes == file.path.stat().st_size, "not all of the file is in its hash")


@contextmanager
def _file(content: bytes, folder: Path) -> Iterator[RecordedFile]:
    path = folder / "input"
    path.write_bytes(content)
    file = RecordedFile(path, path.name)
    with _complaint():
        yield file
        _check_tally(file)


def _otlp_framing(content: bytes, folder: Path) -> None:
    with _file(content, folder) as file:
        _check(sum(1 for _ in trace_batches(file)) > 0, "not even an empty batch")


def _otlp_traces(content: bytes, folder: Path) -> None:
    with _file(content, folder) as file:
        found = read_traces([file])
        _check(len(found.remarks) < 20, "remarks without bound")
        for remark in found.remarks:
            _check_line(remark)
        if found.journeys is not None:
            lifecycles, _events = on_zero(found.journeys, 0, Scratch())
            numbers = lifecycles["journey"].to_list()
            _check(numbers == list(range(lifecycles.height)), "journeys that are not numbered")
        if found.requests is not None:
            # Stamps that contradict each other are kept as they are, and told.
            contradictory = any(remark.startswith("time order in") for remark in found.remarks)
            _check_requests(found.requests, folder, may_be_negative=contradictory)


def _otlp_record(content: bytes, folder: Path) -> None:
    """One message: each of its spans is a row or rejected, and no row has an event of another's."""
    file, rows = RecordedFile(folder / "input", "input"), BatchRows()
    steps = sum(1 for _ in read_record(content, "line 1", 1, rows, file))
    batch = rows.batch("line")
    _check(len(batch.spans) <= steps, "more rows than spans")
    _check(len(batch.spans) + file.tally.rejected_count >= steps, "a span was lost")
    for events in (batch.steps, batch.snapshots, batch.journey_events):
        _check(events["span_row"].is_between(0, len(batch.spans) - 1).all(), "an event of no span")


def _requests(form: RequestFormat, content: bytes, folder: Path) -> None:
    form.recognises(content)
    with _file(content, folder) as file:
        read = form.read(file, folder / "stamps")
        sent = read.aggregates.filter((pl.col("metric") == "requests") & (pl.col("statistic") == "sent"))["value"]
        _check(file.tally.records in (len(read.frame), len(read.aggregates), 1, *sent), "records that are no rows")
        _check_requests(read, folder)


def _check_requests(read: RequestsRead, folder: Path, may_be_negative: bool = False) -> None:
    _check(read.frame.schema == pl.Schema(READ_SCHEMA), "another schema")
    _check(read.frame["sent_us"].null_count() == 0, "a request that was never sent")
    ordered, order, _zero_us = in_send_order(read.rows)
    _check(ordered["arrival_us"].is_between(0, (1 << 63) - 1).all(), "an arrival before the first")
    for name in ("ttft_us", "e2e_us"):
        _check(may_be_negative or (read.frame[name].drop_nulls() >= 0).all(), f"a negative {name}")
    if read.prefix is not None:
        _check_prompts(read.prefix.in_order(order), len(read.frame))
    if read.events is not None:
        stamps = (folder / "stamps").stat().st_size // 8
        _check(len(read.events.counts) == len(read.frame), "stamps of no request")
        _check((read.events.offsets + read.events.counts <= stamps).all(), "stamps behind the end")
    for text in (*read.remarks, *read.lacks, read.version or "-", read.model or "-"):
        _check_line(text)
    for text in [*read.frame["request_id"].drop_nulls(), *read.frame["error"].drop_nulls()]:
        _check_line(text)


def _check_prompts(tree: PromptTree, requests: int) -> None:
    prompts = tree.prompts
    _check(prompts["prompt"].to_list() == list(range(len(prompts))), "prompts that are not numbered")
    _check((prompts["parent"].fill_null(-1) < prompts["prompt"]).all(), "a prompt that hangs on a later one")
    _check((prompts["shared_tokens"] <= prompts["tokens"]).all(), "more shared than there is")
    _check(tree.requests["prompt"].is_in(prompts["prompt"].implode()).all(), "a request of no prompt")
    _check(tree.requests["request_index"].is_between(0, requests - 1).all(), "a prompt of no request")


def _kv_events(content: bytes, folder: Path) -> None:
    kv_events.recognises(content)
    with _file(content, folder) as file:
        read = kv_events.read_kv_events([file], None, folder / "events.parquet")
        _check(read.events == file.tally.records, "events that are not counted")


def _server_log(content: bytes, folder: Path) -> None:
    server_log.recognises(content)
    with _file(content, folder) as file:
        log = server_log.read_server_log(file)
        _check_engine({}, log)
        rate = log.prefix_hit_rate
        _check(rate is None or 0 <= rate <= 1, "a share beyond 1")


def _metrics(content: bytes, folder: Path) -> None:
    metrics.recognises(content)
    with _file(content, folder) as file:
        read = metrics.read_metrics([file, file])
        _check(read.aggregates["value"].is_finite().all(), "a number that is none")
        _check(len(read.remarks) < 5, "remarks without bound")
        for remark in (*read.remarks, *map(str, read.engine.values())):
            _check_line(remark)


def _experiment_config(content: bytes, folder: Path) -> None:
    with _file(content, folder) as file:
        _check_engine(read_experiment_config(file).engine, server_log.ServerLog())


def _check_engine(configured: Mapping[str, object], log: server_log.ServerLog) -> None:
    steps, events = no_rows(STEP_SCHEMA), no_rows(JOURNEY_EVENT_SCHEMA)
    settings, findings = engine_of(EngineEvidence(configured, log, {}, {}, None, steps, events), None)
    _check({"max_num_seqs", "max_num_batched_tokens", "block_size", "async_scheduling"} <= settings.keys(), "no value")
    for name, setting in settings.items():
        _check_line(f"{name}: {setting.value} {setting.source} {setting.detail}")
    for finding in findings:
        _check_line(finding.message)


def _forward_passes(content: bytes, folder: Path) -> None:
    iterations.recognises_forward_passes(content)
    with _file(content, folder) as file:
        lines = iterations.IterationLines(Scratch())
        remarks = iterations.read_forward_passes([file], lines)
        read = lines.done()
        _check(read.rows.height <= file.tally.records, "more iterations than records")
        for remark in (*remarks, *read.remarks):
            _check_line(remark)


def _discovery(content: bytes, folder: Path) -> None:
    (folder / "input").write_bytes(content)
    with _complaint():
        known, others = discovery.find(discovery.Source("slug", folder, (folder / "input",)), None)
        _check(sum(map(len, known.values())) + len(others) == 1, "a file was lost")


def _collector_json(content: bytes, _folder: Path) -> None:
    with _complaint():
        _check_batch(batch_of(protobuf_of(content)))


def _collector_protobuf(content: bytes, _folder: Path) -> None:
    with _complaint():
        _check_batch(batch_of(content))


def _check_batch(batch: Batch) -> None:
    again = batch_of(batch.message)
    _check((again.spans, again.rejected_spans) == (batch.spans, 0), "what is stored is not what was counted")
    for text in (batch.reason or "-", *batch.services):
        _check_line(text)


def _scan_otlp(content: bytes, folder: Path) -> None:
    # A first line that tells the framing: only lines are scanned.
    test_otlp_scan.assert_same(folder / "traces.json", b'{"resourceSpans":[]}\n' + content)


def _scan_protobuf(content: bytes, folder: Path) -> None:
    test_otlp_scan_protobuf.assert_alike(folder, [content])


TARGETS: dict[str, Target] = {
    "otlp-json": Target(_otlp_record, seeds.otlp_messages, (mutated_json,)),
    "otlp-protobuf": Target(_otlp_record, seeds.otlp_protobuf, (mutated_protobuf,)),
    "otlp-framing": Target(_otlp_framing, seeds.otlp_framing, (mutated_file,)),
    "otlp-traces": Target(_otlp_traces, seeds.otlp_json, (mutated_json,)),
    "scan-otlp": Target(_scan_otlp, seeds.otlp_json, (mutated_json, mutated_bytes)),
    "scan-otlp-protobuf": Target(_scan_protobuf, seeds.scanned_protobuf, (mutated_protobuf, mutated_bytes)),
    "collector-json": Target(_collector_json, seeds.otlp_messages, (mutated_json,)),
    "collector-protobuf": Target(_collector_protobuf, seeds.otlp_protobuf, (mutated_protobuf,)),
    "kv-events": Target(_kv_events, seeds.kv_events, (mutated_json, mutated_bytes)),
    "server-log": Target(_server_log, seeds.server_log, (mutated_rows, mutated_bytes)),
    "experiment-config": Target(_experiment_config, seeds.experiment_config, (mutated_bytes,)),
    "metrics": Target(_metrics, seeds.metrics, (mutated_bytes,)),
    "forward-passes": Target(_forward_passes, seeds.forward_passes, (mutated_json,)),
    "discovery": Target(_discovery, seeds.of_every_kind, (mutated_file, mutated_message, mutated_rows)),
}
_MUTATORS: dict[str, tuple[Mutator, ...]] = {
    "parquet": (mutated_table,),
    "table": (mutated_json, mutated_rows, mutated_table),
    **dict.fromkeys(
        ("tracev2", "azure-llm", "burstgpt", "legacy-blis-csv", "guidellm-csv", "load-levels"), (mutated_rows,)
    ),
}
TARGETS |= {
    form.name: Target(partial(_requests, form), seeds.BY_FORMAT[form.name], _MUTATORS.get(form.name, (mutated_json,)))
    for form in REQUEST_FORMATS
}
