"""An experiment directory, as load generators and vLLM leave it, read into one :class:`Recording`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.identity import alias_of, workload_of
from blis_replay.ingest.readers import discovery, formats
from blis_replay.ingest.readers.clients import inference_perf
from blis_replay.ingest.readers.clients.inference_perf import stage_of_requests
from blis_replay.ingest.readers.discovery import Part, Source
from blis_replay.ingest.readers.documents import aggregate_frame, text, tokens
from blis_replay.ingest.readers.experiment_config import (
    LoadConfig,
    declared_load,
    read_experiment_config,
    read_load_config,
)
from blis_replay.ingest.readers.files import Progress, RecordedFile, Tally
from blis_replay.ingest.readers.formats import TABLE, request_formats
from blis_replay.ingest.readers.otlp import traces as otlp_traces
from blis_replay.ingest.readers.requests import (
    RequestsRead,
    ServerFacts,
    in_send_order,
    shared_by_all,
    together,
    with_summary,
)
from blis_replay.ingest.readers.server import log as server_log
from blis_replay.ingest.readers.server.engine_settings import EngineEvidence, GivenArguments, engine_of
from blis_replay.ingest.readers.server.iterations import IterationLines
from blis_replay.ingest.readers.server.metrics import read_metrics
from blis_replay.ingest.recording import (
    AGGREGATE_SCHEMA,
    ARRIVALS,
    BY_CLIENT,
    ONE_TABLE,
    PUBLISHED,
    RECORDED,
    REQUEST_SCHEMA,
    Clock,
    Finding,
    GroundTruth,
    PromptTree,
    Recording,
    Setting,
    SourceFile,
    TokenEvents,
)
from blis_replay.ingest.rows import Rows, no_rows
from blis_replay.ingest.scratch import Scratch, give_back
from blis_replay.ingest.served import published
from blis_replay.ingest.server_side import ServerSide, ServerTimes
from blis_replay.ingest.slice import others_among, others_in_flight, sliced
from blis_replay.ingest.steps.placed import place
from blis_replay.ingest.stream import with_counted_lengths, with_decode_lengths


@contextmanager
def read_recording(
    source: Source | Path,
    *,
    profile: Mapping[str, object] | None = None,
    given: GivenArguments | None = None,
    progress: Progress | None = None,
) -> Iterator[Recording]:
    """Every known file of a source as one :class:`Recording`, with what was found when it was read.

    ``profile``: the bundled profile of the slug (``model``, ``hardware``, ``tensor_parallelism``, ``vllm_version``,
    ``engine``); ``given``: engine arguments that overrule all others; ``progress(file name, bytes done, bytes total)``.
    Files of token events live until the context ends.  Raises :class:`RecordingError` if a file cannot be read at all,
    or if there is nothing to judge.
    """
    if isinstance(source, Path):
        source = discovery.only_source(source)
    with TemporaryDirectory(prefix="blis-replay-") as scratch:
        yield _Assembly(source, Path(scratch), profile or {}, given, progress).recording()


def parts_of(source: Source, by: str) -> list[Source]:
    """A source for each ``client``'s file or each load ``stage`` of a recording; raises :class:`RecordingError`."""
    of = source.part or Part()
    if by == "client":
        known, others = discovery.find(replace(source, part=of), None)
        files = next((known[form.name] for form in request_formats() if form.name in known), [])
        parts = [replace(of, client=file.name) for file in files]
        remedy = f"leave --by out; {discovery.columns_there(source, others)}"
    else:
        with read_recording(replace(source, part=of)) as recording:
            stages = recording.requests["stage"].drop_nulls().unique().sort().to_list()
        parts = [replace(of, stage=stage) for stage in stages]
        remedy = "leave --by out, or use --from and --to"
    if not parts:
        raise RecordingError(source.root, "", f"it has no {by} to divide it by", remedy)
    names = [Part(client=part.client, stage=part.stage).name() for part in parts]
    return [replace(source, part=part, slug=f"{source.slug}-{name}") for part, name in zip(parts, names, strict=True)]


def content_hash_of(
    source: Source, profile: Mapping[str, object], given: GivenArguments | None, progress: Progress | None
) -> str:
    """``content_hash`` that :func:`read_recording` would give a source, from the bytes of its files alone."""
    known, others = discovery.find(source, progress)
    read = [file.source(kind) for kind, files in known.items() for file in files]
    return _content_hash((*read, *others), profile, given)


def _content_hash(files: Sequence[SourceFile], profile: Mapping[str, object], given: GivenArguments | None) -> str:
    """SHA-256 over the known files, the arguments given and the profile: equal input, equal hash."""
    engine = sorted(given.arguments.items()) if given and given.arguments else ""
    read = sorted((file.name, file.sha256) for file in files if file.kind != "unknown")
    content: Any = [read, engine, profile]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


_MOST_FOUND_AGAIN = 0.1  # share of the prefix hits that preempted requests can explain


class _Assembly:
    """One reading of one directory: its files, what they state of the run and its server, and what is missing."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        profile: Mapping[str, object],
        given: GivenArguments | None,
        progress: Progress | None,
    ) -> None:
        self.source, self.folder, self.profile, self.given = source, folder, profile, given
        self.scratch = Scratch()
        self.iterations = IterationLines(self.scratch)
        self.known, self.others = discovery.find(source, progress)
        self.log = server_log.ServerLog()
        self.experiment = ServerFacts()
        self.load, self.aggregates = LoadConfig(), pl.DataFrame(schema=AGGREGATE_SCHEMA)
        self.versions: dict[str, str] = {}  # file -> the tool and version that wrote it
        self.unused: dict[str, str] = {}  # file -> why its requests were not used
        self.missing: list[str] = []
        self.findings: tuple[Finding, ...] = ()  # of files that are not read
        self.files_of_rows = np.empty(0, str)  # the client's file of each request, in the order of the files
        self.server = ServerSide(self.scratch, self.missing)

    def recording(self) -> Recording:
        self._read_configuration()
        traces = self.server.read(self.known)
        best = self._requests(traces)
        asked = (best, traces.requests, self.server.log)
        features = sorted({name for read in asked if read is not None for name in read.features})
        traces = replace(traces, requests=None)
        if best is not None:
            self._take_reported(best)
        if best is None and self.aggregates.is_empty() and traces.steps.is_empty():
            raise self._nothing_found()
        ground_truth = _ground_truth(best, self.aggregates)
        model = self._model(best, ground_truth)
        requests, client, events, prefix = self._placed(best)
        del best
        server = self.server.placed(traces, requests, client)
        traces = replace(traces, journeys=None)  # as they were read, events are many
        give_back()
        engine, findings = self._engine(server)
        if features:
            engine["request_features"] = Setting(", ".join(features), "recorded", "requests")
        iterations = self.iterations.done()
        self.missing += iterations.remarks
        slug = self.source.slug
        workload, prefix_hit_rate = workload_of(slug, self.experiment.app), self._prefix_hit_rate()
        files = self._files()
        recording = Recording(
            slug=slug,
            alias=alias_of(slug, model, workload),
            workload=workload,
            model=model,
            hardware=self._hardware(),
            tensor_parallelism=self._tensor_parallelism(),
            ground_truth=ground_truth,
            content_hash=_content_hash(files, self.profile, self.given),
            engine=engine,
            stages=self.load.stages,
            shared_prefix=self.load.shared_prefix,
            ignore_eos=self.load.ignore_eos,
            prefix_hit_rate=prefix_hit_rate,
            requests=requests,
            token_events=events,
            steps=server.steps,
            snapshots=traces.snapshots,
            lifecycles=server.lifecycles,
            journey_events=server.journey_events,
            iterations=iterations.rows,
            aggregates=pl.concat([self.aggregates, self.metrics.aggregates, self._generated(requests, client)]),
            clocks=tuple(clock for clock in (client, *server.clocks) if clock is not None),
            files=files,
            missing=tuple(self.missing),
            recorder=self.server.log.measured if self.server.log else None,
            dropped_step_events=traces.dropped_events,
            prefix=prefix,
            load_profile=self.declared,
            findings=(*findings, *self.findings),
        )
        return self._part(place(recording, self.scratch))

    def _take_reported(self, best: RequestsRead) -> None:
        """Take what the client's own file says about the run, where no configuration or report does."""
        load = self.load
        self.aggregates = best.aggregates if self.aggregates.is_empty() else self.aggregates
        self.load = replace(
            load,
            stages=load.stages or best.stages,
            configured_output_tokens=load.configured_output_tokens or best.configured_output_tokens,
            ignore_eos=best.ignore_eos if load.ignore_eos is None else load.ignore_eos,
        )

    def _generated(self, requests: Rows, client: Clock | None) -> pl.DataFrame:
        """How many output tokens the server's throughput lines count in the run, as ``AGGREGATE_SCHEMA``."""
        run = requests.aggregate(
            begin="min(arrival_us)", end="max(arrival_us + coalesce(e2e_us, 0))", tokens="sum(output_tokens)"
        )
        if client is None or None in run.values():
            return pl.DataFrame(schema=AGGREGATE_SCHEMA)
        zero_us = client.zero_us if (placed := client.kind == "epoch" and not client.constructed) else 0
        begin_s, end_s = ((zero_us + run[end]) / 1e6 for end in ("begin", "end"))
        served = self.log.throughput.served(begin_s, end_s, float(run["tokens"]), placed=placed)
        # Several engines may print to several logs: then one has a part of the tokens.
        alone = self.log.given.get("data_parallel_size", 1) == 1 and "data_parallel_rank" not in self.log.given
        bounds = zip(("least", "most") if alone else ("least",), served or (), strict=False)
        return aggregate_frame((-1, "server_log_output_tokens", name, tokens) for name, tokens in bounds)

    def _prefix_hit_rate(self) -> float | None:
        """Over all prompt tokens between two snapshots of metrics, else from the last lines of the server's log.

        Not used where the hits may be those of preempted requests that came back, and found what they had computed.
        """
        counted, logged = self.metrics.prefix_hit_rate, self.log.prefix_hit_rate
        names = ("prompt_tokens", "output_tokens", "preemptions", "prefix_hits")
        sums = (published(self.metrics.aggregates, -1, f"server_{name}", "sum") or 0.0 for name in names)
        prompts, outputs, preempted, hits = sums
        requests = published(self.metrics.aggregates, -1, "server_requests", "succeeded") or 1.0
        again = preempted * (prompts + outputs) / requests > _MOST_FOUND_AGAIN * hits > 0
        if (self.log.kv_full and bool(logged)) if counted is None else again:
            self.missing.append(
                "prefix hits of prompts: requests were preempted, and the hits that the server counts may be what "
                "these found of their own when they came back; not used"
            )
            return None
        return logged if counted is None else counted

    def _nothing_found(self) -> RecordingError:
        """Why there is nothing to judge: every record was rejected, or no file has requests."""
        files = self._files()
        problem = "no requests, no aggregates and no steps in it"
        if lost := next((file.loss() for file in files if file.rejected_count), ""):
            problem, remedy = f"{problem} ({lost})", "repair the file, or copy it again"
        elif self.known:
            read = ", ".join(f"{file.name} ({kind})" for kind, found in self.known.items() for file in found[:1])
            problem += f", but {read} was read"
            remedy = (
                "name with it what says how requests fared: a load generator's result "
                "(vllm bench, SGLang, GuideLLM, AIPerf, inference-perf), a table of requests, traces or a step log"
            )
        else:
            problem += " (none of its files is of a known format)" if files else " (it has no files)"
            remedy = discovery.how_to_go_on(self.source, self.others)
        paths = self.source.paths or ()
        return RecordingError(paths[0] if len(paths) == 1 else self.source.root, "", problem, remedy)

    def _one(self, kind: str) -> RecordedFile | None:
        return next(iter(self.known.get(kind, [])), None)

    def _read_configuration(self) -> None:
        kinds = (formats.EXPERIMENT, formats.RESOLVED, formats.PROFILE)
        experiment_file, resolved_file, profile_file = map(self._one, kinds)
        for part in discovery.oldest_first(self.known.get(formats.SERVER_LOG, [])):
            self.log = server_log.read_server_log(part, self.iterations, self.log)
        load, asked = (read_load_config(file) if file else LoadConfig() for file in (resolved_file, profile_file))
        self.load, self.declared = load, declared_load(asked, load)
        if resolved_file is None:
            self.missing.append(
                "resolved load configuration (results/config.yaml): what the profile asks for need not be what was run"
            )
            self.load = LoadConfig(model=asked.model, prefix_tokens=asked.prefix_tokens)
        if experiment_file:
            self.experiment = read_experiment_config(experiment_file)
        self.header, self.aggregates = self._header_facts(), self._reported()
        self.metrics = read_metrics(self.known.get(formats.METRICS, []))
        self.missing += self.metrics.remarks

    def _header_facts(self) -> ServerFacts:
        """What a file beside the requests says of the server: the header of a trace, or another file that tells."""
        for kind in formats.file_kinds().values():
            if kind.server is not None and (file := self._one(kind.name)):
                return kind.server(file)
        return ServerFacts()

    def _reported(self) -> pl.DataFrame:
        frames = [pl.DataFrame(schema=AGGREGATE_SCHEMA)]
        if summary := self._one(formats.SUMMARY):
            frames.append(inference_perf.read_aggregates(summary))
        for file in self.known.get(formats.STAGE, []):
            frames.append(inference_perf.read_aggregates(file, discovery.stage_of(file.name)))
        return pl.concat(frames)

    def _requests(self, traces: otlp_traces.TracesRead) -> RequestsRead | None:
        """The requests of the best source: client records in the order of the formats, then the server's spans."""
        best: RequestsRead | None = None
        used = used_form = ""
        unread: list[tuple[formats.RequestFormat, RecordedFile, str]] = []  # with the reason
        # A table whose columns the user has named is what is meant.
        for form in sorted(request_formats(), key=lambda form: not (form.name == TABLE and self._table_is_meant())):
            if not (found := self.known.get(form.name, [])):
                continue
            sums_up = bool(form.sums_up) and form.sums_up == used_form
            if best is not None and best.rows.height and not sums_up:
                unread += ((form, file, f"the requests are those of {used}") for file in found)
                continue
            if form.name == TABLE and traces.requests is not None and not self._table_is_meant():
                why = "the server traced its requests; --columns says that this table is the client's"
                self.unused |= {file.name: why for file in found}
                continue
            files = found if self.source.part is not None else found[:1]
            unread += ((form, file, f"{files[0].name} is read; {BY_CLIENT}") for file in found[len(files) :])
            read = self._read(form, files)
            if best is not None and sums_up:
                best = with_summary(best, read)
            elif read.rows.height or (best is None and len(read.aggregates)):
                best, used_form = read, form.name
                used = files[0].name if len(files) == 1 else f"{len(files)} files"
        self.unused |= {file.name: why for _form, file, why in unread}
        if best is not None and best.rows.height:
            self._count_unread(best, used, unread)
        if traces.requests is None:
            return best
        return self.server.paired_with(traces.requests, best, used, self.files_of_rows)

    def _count_unread(
        self, best: RequestsRead, used: str, unread: Iterable[tuple[formats.RequestFormat, RecordedFile, str]]
    ) -> None:
        """What requests the files have that are not read: the same ones, or others that the server had to serve."""
        beside, dated = Counter[str](), True
        for form, file, _why in unread:
            try:  # its rejected records are not those of this recording
                read = form.read(replace(file, tally=Tally()), self.folder / "stamps-of-others")
            except RecordingError:
                continue
            count, by_clock = others_among(best, read)
            if count:
                beside[file.name], dated = count, dated and by_clock
                self.unused[file.name] = f"{used} is read; {ONE_TABLE}"
        when = "were in flight meanwhile" if dated else "may have been in flight (no clock in common says when)"
        self.findings = (*others_in_flight(beside, best.rows.height, when, ONE_TABLE),)

    def _read(self, form: formats.RequestFormat, files: Sequence[RecordedFile]) -> RequestsRead:
        """The requests of the files of one format, together."""
        parts = {}
        for number, file in enumerate(files):
            read = form.read(file, stamps_path := self.folder / f"stamps-{number}.int64")
            if form.with_stamps and (stamps := self._one(form.stamps)):
                read = form.with_stamps(read, stamps, stamps_path)
            self.versions[file.name] = read.version
            parts[file.name] = read
        self.files_of_rows = np.repeat([*parts], [read.rows.height for read in parts.values()])
        return together(parts, self.scratch, self.source.part.client if self.source.part else None)

    def _part(self, recording: Recording) -> Recording:
        """The part of the recording that is asked for."""
        part = self.source.part
        if part is None or part == Part():
            return recording
        if recording.ground_truth == PUBLISHED:
            problem = "only aggregates are recorded, so nothing is known of a part of its requests"
            raise RecordingError(self.source.root, "", problem, "record its requests, or its counters alone")
        requests = recording.requests.frame(["arrival_us", "stage"])
        if len(self.files_of_rows):
            files = self.files_of_rows[self.server.order]
        elif part.client is None:  # only the server's spans have requests
            files = np.full(requests.height, "")
        else:
            raise RecordingError(self.source.root, part.client, "it is not read as the client's", "say its --columns")
        sent, stage = requests["arrival_us"], requests["stage"]
        mine = (sent >= (part.from_us or 0)) & (sent < (1 << 62 if part.until_us is None else part.until_us))
        mine &= pl.Series(files == part.client) if part.client is not None else True
        mine &= stage.eq_missing(part.stage) if part.stage is not None else True
        if not mine.any():
            last_s = int(sent.max() or 0) / 1e6  # type: ignore[arg-type]
            problem = f"it has no requests in {part.name()}; the first is sent at 0 s, the last at {last_s:.1f} s"
            stages = ", ".join(map(str, sorted(stage.drop_nulls().unique())))
            raise RecordingError(self.source.root, "", problem, f"load stages there are: {stages or 'none'}")
        return sliced(recording, mine.to_numpy(), files, with_report=part == Part(client=part.client))

    def _table_is_meant(self) -> bool:
        """Whether the user names the table: its column names alone do not make it a table of requests."""
        return bool(self.source.columns) or self.source.form == TABLE

    def _model(self, best: RequestsRead | None, ground_truth: GroundTruth) -> str | None:
        candidates = {
            "--model": self.source.model,
            "exp-config.yaml": self.experiment.model,
            "the load configuration": self.load.model,
            "the trace header": self.header.model,
            "the server log": self.log.model,
            "the server's metrics": self.metrics.model,
            "the requests": best.model if best else None,
            "the bundled profile": text(self.profile.get("model")),
        }
        named = {where: model for where, model in candidates.items() if model}
        if not named and self.server.log is not None and self.server.log.model:
            # By its path, where others have the name that it is served by.
            named = {"the step log": self.server.log.model}
        if not named:
            self.missing.append(
                "model: it can be simulated as any, and compared with none"
                if ground_truth == ARRIVALS
                else "model: no file of it names one; say it with `blis-replay ingest --model NAME`"
            )
            return None
        where, model = next(iter(named.items()))
        for other, name in named.items():
            if name.rsplit("/", 1)[-1].lower() != model.rsplit("/", 1)[-1].lower():
                self.missing.append(f"agreement on the model: {where} says {model} (used), {other} says {name}")
        return model

    def _placed(self, best: RequestsRead | None) -> tuple[Rows, Clock | None, TokenEvents | None, PromptTree | None]:
        """Requests in send order with stages and decode lengths, their clock, token events and prompt blocks."""
        if best is None or best.rows.is_empty():
            self.missing += [*(best.lacks if best and best.lacks else ("requests",)), "token times"]
            return no_rows(REQUEST_SCHEMA), None, None, None
        self.missing += best.remarks
        ordered, order, zero_us = in_send_order(best.rows)
        self.server.order = order
        # A clock that stands at a whole second at the first send was set there by hand.
        by_hand = best.clock_kind == "epoch" and zero_us % 1_000_000 == 0
        client = Clock(best.clock_name, best.clock_kind, zero_us, by_hand or bool(best.placed), best.placed)
        load = self.load
        counts = [published(self.aggregates, stage.stage, "requests", "sent") for stage in load.stages]
        stage = stage_of_requests(ordered["arrival_us"].to_numpy(), load.stages, counts)
        stages = None if stage is None else pl.Series("stage", stage, pl.Int64)
        if not ordered["stage"].null_count():
            stages = None
        writer, first = self.scratch.writer(REQUEST_SCHEMA), 0
        for batch in ordered.batches():
            staged = batch if stages is None else batch.with_columns(stages.slice(first, batch.height))
            writer.add(with_decode_lengths(staged, load.configured_output_tokens, load.ignore_eos))
            if ordered.held is None:
                writer.to_table()  # this many rows go to the database
            first += batch.height
        requests = writer.done()
        events: TokenEvents | None = None
        if best.events is not None:
            raw = best.events
            events = replace(raw, offsets=raw.offsets[order], counts=raw.counts[order], zero_us=zero_us)
            requests = with_counted_lengths(requests, events)
        else:
            self.missing.append("token times")
        prompts = best.prefix
        if prompts is None and load.prefix_tokens is not None:
            source = f"{load.prefix_tokens:,} prompt tokens that all share, by the load profile (prefix_tokens)"
            prompts = shared_by_all(requests.height, load.prefix_tokens, source)
        return requests, client, events, None if prompts is None else prompts.in_order(order)

    def _engine(self, server: ServerTimes) -> tuple[dict[str, Setting], tuple[Finding, ...]]:
        evidence = EngineEvidence(
            (self.experiment, self.header),
            self.log,
            self.profile,
            self._hardware(),
            server.steps,
            server.journey_events,
            self.server.log.settings if self.server.log else {},
            self.metrics.engine,
        )
        settings, findings = engine_of(evidence, self.given)
        unknown = (name for name in ("max_model_len", "num_gpu_blocks") if name not in settings)
        self.missing += [f"engine argument {name}" for name in unknown]
        return settings, findings

    def _hardware(self) -> str | None:
        return self.experiment.hardware or self.header.hardware or text(self.profile.get("hardware"))

    def _tensor_parallelism(self) -> int | None:
        log = self.log.given | self.log.resolved
        candidates = (
            self.given and self.given.arguments.get("tensor_parallel_size"),
            self.experiment.tensor_parallelism,
            self.experiment.engine.get("tensor_parallel_size"),
            self.header.tensor_parallelism,
            log.get("tensor_parallel_size"),
            self.profile.get("tensor_parallelism"),
        )
        return next((count for count in map(tokens, candidates) if count), None)

    def _files(self) -> tuple[SourceFile, ...]:
        read = list(self.others)
        for kind, files in self.known.items():
            for file in files:
                why = self.unused.get(file.name)
                used_as = self.versions.get(file.name) or kind
                read.append(file.source(f"{kind} (not used: {why})" if why else used_as))
        return tuple(sorted(read, key=lambda file: file.name))


def _ground_truth(best: RequestsRead | None, aggregates: pl.DataFrame) -> GroundTruth:
    """What a replay can be compared with; nothing where no request was timed."""
    if best is None or best.rows.is_empty():
        return PUBLISHED if len(aggregates) else RECORDED
    timed, failed = "count(ttft_us) + count(e2e_us)", "count(*) FILTER (status <> 'ok')"
    known = best.rows.aggregate(timed=timed, failed=failed, rebuilt="count(arrival_within_us)")
    if known["timed"] or known["failed"] or best.events is not None:
        return RECORDED
    return PUBLISHED if known["rebuilt"] else ARRIVALS
