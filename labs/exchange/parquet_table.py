"""The table of requests that `blis-replay export --to parquet` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.documents import MAX_INTEGER, MAX_TOKENS, text, whole
from blis_replay.ingest.readers.files import FREE_EXPANSION_BYTES, MAX_EXPANSION_RATIO, RecordedFile
from blis_replay.ingest.readers.formats import EXPORTED_TABLE, RequestFormat
from blis_replay.ingest.readers.requests import NONE, READ_SCHEMA, RawPrompts, RequestsRead
from blis_replay.ingest.recording import OUTPUT_LENGTH_SOURCES, PROMPT_SCHEMA, REQUEST_SCHEMA, STATUSES
from blis_replay.ingest.rows import rows_of

# Of PROMPT_SCHEMA, the names under which a row has them of its request's prompt.
PROMPT_COLUMNS = {name: f"prefix_{name}" for name in PROMPT_SCHEMA}
_PROMPT = {PROMPT_COLUMNS[name]: kind for name, kind in PROMPT_SCHEMA.items()}
_READ = READ_SCHEMA | _PROMPT
_BATCH_ROWS = 10_000
_MAX_METADATA_BYTES = 1 << 16
_LENGTHS = ("prompt_tokens", "output_tokens", "output_tokens_reported", "max_tokens", "cached_prompt_tokens")
_TIMES = ("arrival_us", "ttft_us", "e2e_us", "queue_us", "prefill_us", "decode_us", "stage")
_TEXTS = tuple(name for name, kind in REQUEST_SCHEMA.items() if kind == pl.String)
_MAX_TEXT_CHARS = 500
_FREE_VALUES = 16_000_000
_KINDS = ("epoch", "monotonic", "relative")


def read_requests(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order, with everything that the export knew of them.

    Raises :class:`RecordingError` if the file is not valid Parquet or its columns are not those of
    the export.  A row that cannot be used is rejected and counted.
    """
    import pyarrow
    from pyarrow import parquet

    frames: list[pl.DataFrame] = []
    try:
        with file.path.open("rb") as raw:
            metadata = parquet.read_metadata(raw)
            _check_bounds(metadata, raw.seek(0, os.SEEK_END))
            columns = {metadata.schema.column(i).path for i in range(metadata.num_columns)}
            # A text that all rows share is one in the file, and would be as many as there are rows.
            shared = [name for name in _TEXTS if name in columns]
            with parquet.ParquetFile(raw, metadata=metadata, read_dictionary=shared) as table:
                told = _told(table.schema_arrow.metadata)
                frames += _frames(file, table)
    except (pyarrow.ArrowException, pl.exceptions.PolarsError, ValueError, OverflowError, OSError) as error:
        problem = " ".join(str(error).split())[:120]
        raise RecordingError(file.path, "", f"not a sound table of requests ({problem})", "export it again") from error
    read = pl.concat([pl.DataFrame(schema=_READ), *frames])
    file.tally.records = len(read)
    zero_us = whole(told["clock"].get("zero_us")) or 0
    return RequestsRead(
        rows_of(read.select(READ_SCHEMA.keys()).with_columns(pl.col("sent_us") + zero_us)),
        "server" if told["clock"].get("name") == "server" else "client",
        kind if (kind := told["clock"].get("kind")) in _KINDS else "relative",
        text(told.get("model")),
        prefix=_prefix(read.select(_PROMPT.keys()), text(told.get("prefix_source")) or "prompts of the table"),
    )


def _told(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """What the export says of the whole table; ``clock`` is always a mapping."""
    raw = (metadata or {}).get(EXPORTED_TABLE, b"{}")
    told = json.loads(raw) if len(raw) <= _MAX_METADATA_BYTES and raw.count(b"[") + raw.count(b"{") < 100 else {}
    told = told if isinstance(told, dict) else {}
    return told | {"clock": told["clock"] if isinstance(told.get("clock"), dict) else {}}


def _check_bounds(metadata: Any, file_bytes: int) -> None:
    """Raises ``ValueError`` if there is much more in the columns than in the file, where runs of a value are free.

    The metadata of single columns are left alone: pyarrow ends the process over some that are not sound.
    """
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if max(metadata.num_rows, sum(group.num_rows for group in groups)) > max(_FREE_VALUES, file_bytes):
        raise ValueError("more values in a column than the file has bytes")
    if sum(group.total_byte_size for group in groups) > max(FREE_EXPANSION_BYTES, MAX_EXPANSION_RATIO * file_bytes):
        raise ValueError(f"more than {MAX_EXPANSION_RATIO} times the size of the file in it")


def _as_stored(batch: Any, kinds: Any) -> Any:
    """The batch with checked texts and the types that ``kinds`` has; raises ``ArrowException`` if it cannot."""
    import pyarrow as pa
    from pyarrow import compute

    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        column.validate(full=True)  # Polars aborts on text that is not UTF-8
        if pa.types.is_dictionary(column.type) and name in _TEXTS:
            cut = compute.utf8_slice_codeunits(column.dictionary, 0, _MAX_TEXT_CHARS)
            column = pa.DictionaryArray.from_arrays(column.indices, cut)
        columns[name] = column.cast(kinds.field(name).type)
    return pa.RecordBatch.from_pydict(columns)


def _frames(file: RecordedFile, table: Any) -> Iterator[pl.DataFrame]:
    """The usable rows, a batch at a time, as ``READ_SCHEMA`` with times from 0, and their prompts."""
    import pyarrow as pa

    schema = REQUEST_SCHEMA | _PROMPT
    kinds = pl.DataFrame(schema=schema).to_arrow().schema
    if "arrival_us" not in table.schema_arrow.names:
        raise ValueError("there is no column arrival_us")
    fields = [field for field in table.schema_arrow if field.name in schema]
    if len({field.name for field in fields}) < len(fields):
        raise ValueError("two columns have one name")
    if any(pa.types.is_nested(field.type) for field in fields):  # any number of values, whatever the number of rows
        raise ValueError("a column has more than one value per row")
    first = 1
    for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=[field.name for field in fields]):
        given = pl.DataFrame(pl.from_arrow(_as_stored(batch, kinds)))
        absent = [pl.lit(None).alias(name) for name in schema if name not in given.columns]
        frame = given.with_columns(absent).select(pl.col(name).cast(kind) for name, kind in schema.items())
        frame = frame.with_columns(
            pl.col("status").fill_null("ok"),
            *(pl.Series(name, [text(value) for value in frame[name]], pl.String) for name in ("request_id", "error")),
        )
        problems = frame.select(pl.coalesce(_problems())).to_series()
        for place in problems.is_not_null().arg_true():
            file.tally.reject(f"row {first + place}", f"{problems[place]} is not usable")
        first += len(frame)
        usable = frame.filter(problems.is_null()).with_columns(pl.col("arrival_us").alias("sent_us"))
        more = [pl.lit(None).cast(kind).alias(name) for name, kind in READ_SCHEMA.items() if name not in usable.columns]
        yield usable.with_columns(more).select(_READ.keys())


def _problems() -> list[pl.Expr]:
    """For each column its name where its value cannot be, else null."""
    beyond = dict.fromkeys(_TIMES, MAX_INTEGER) | dict.fromkeys(_LENGTHS, MAX_TOKENS)
    prompt, parent, shared, known = (pl.col(name) for name in _PROMPT)
    bad = {
        "arrival_us": pl.col("arrival_us").is_null(),
        "status": ~pl.col("status").is_in(STATUSES),
        "output_tokens_source": pl.col("output_tokens_source").is_null() != pl.col("output_tokens").is_null(),
        "prefix_prompt": prompt.is_not_null() & ~prompt.is_between(0, MAX_INTEGER).fill_null(False),
        "prefix_parent": parent.is_not_null() & ~parent.is_between(0, prompt - 1).fill_null(False),
        "prefix_shared_tokens": prompt.is_not_null() & ~shared.is_between(0, known).fill_null(False),
    }
    named = pl.col("output_tokens_source")
    rules = [*bad.items(), ("output_tokens_source", named.is_not_null() & ~named.is_in(OUTPUT_LENGTH_SOURCES))]
    rules += [(name, (pl.col(name) < 0) | (pl.col(name) >= limit)) for name, limit in beyond.items()]
    return [pl.when(rule.fill_null(False)).then(pl.lit(name)) for name, rule in rules]


def _prefix(rows: pl.DataFrame, source: str) -> RawPrompts | None:
    """The prompts of the rows, numbered anew without gaps; a prompt whose parent is not there has none."""
    named = rows.rename({column: name for name, column in PROMPT_COLUMNS.items()})
    prompts = named.drop_nulls("prompt").unique("prompt", keep="first").sort("prompt")
    if prompts.is_empty():
        return None
    numbers = prompts.select(pl.col("prompt"), pl.int_range(pl.len(), dtype=pl.Int64).alias("number"))
    parent, prompt = (_numbered(frame[name], numbers) for frame, name in ((prompts, "parent"), (named, "prompt")))
    tokens = np.minimum(prompts["tokens"].to_numpy(), MAX_TOKENS)
    shared = np.where(parent == NONE, 0, np.minimum(prompts["shared_tokens"].to_numpy(), tokens))
    return RawPrompts(source, prompt, parent, np.minimum(shared, tokens[parent]), tokens)


def _numbered(values: pl.Series, numbers: pl.DataFrame) -> NDArray[np.int64]:
    return values.replace_strict(numbers["prompt"], numbers["number"], default=NONE).fill_null(NONE).to_numpy()


FORMAT = RequestFormat("parquet-export", read=read_requests)
