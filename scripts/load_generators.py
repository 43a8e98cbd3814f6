"""What load generators report and what is true: ``python scripts/load_generators.py DIRECTORY``.

DIRECTORY has a folder for each tool and version, with a folder for each run: the tool's own
files, and ``truth.jsonl``, what the server saw.  Prints the tables of docs/load-generators.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
from client_truth import ClientRun, compare

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.evidence import decode_gap_us
from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.stream import published

VALUES = [
    *("run", "requests", "stamps a token", "ITL reported", "TPOT reported", "gap true", "gap ingested"),
    *("output reported", "output true", "lengths right as reported", "as ingested", "prompts right"),
]
CLOCKS = ["run", "send to arrival", "first token stamped late", "E2E past the last token", "E2E past the stream's end"]
_TPOT = ("tpot_reported", "tpot_with_ttft_reported", "tpot_over_n_reported")


def main(root: Path) -> None:
    """Print a table of values and one of clocks, one row per run; a run without requests is named with the reason."""
    of_values, of_clocks, without = [], [], []
    for directory in sorted((path for path in root.glob("*/*") if path.is_dir()), key=_by_version):
        name = f"{directory.parent.name}/{directory.name}"
        try:
            run = _read(directory)
        except RecordingError as error:
            without.append(f"- {name}: {error.problem}")
            continue
        if run is None:
            without.append(f"- {name}: means and percentiles of its only load level")
            continue
        of_values.append(table_row(name, *values(run)))
        of_clocks.append(table_row(name, *clocks(run)))
    print("\n".join([*_head(VALUES), *of_values, "", *_head(CLOCKS), *of_clocks, "", *without]))


def _by_version(directory: Path) -> tuple[str, list[int], str]:
    tool, _dash, version = directory.parent.name.rpartition("-")
    return tool, [int(part) for part in version.split(".") if part.isdigit()], directory.name


def _read(directory: Path) -> ClientRun | None:
    with TemporaryDirectory() as scratch, read_recording(directory, profile={"model": "unnamed"}) as recording:
        if recording.requests.height == 0:
            return None
        return compare(recording, directory, Path(scratch) / "s.duckdb")


def values(run: ClientRun) -> Iterator[str]:
    """The cells of a run below ``VALUES``, but for its name."""
    done = run.pairs.filter(pl.col("status") == "ok")
    aggregates = run.recording.aggregates
    yield f"{len(run.pairs)}, {len(done)} completed"
    yield f"{run.stamps / int(done['decoded_tokens'].sum()):.2f}" if run.stamps else "none"
    yield _ms(published(aggregates, -1, "itl_reported", "mean"))
    yield _ms(next((us for metric in _TPOT if (us := published(aggregates, -1, metric, "mean"))), None))
    streamed = done.drop_nulls("first_token_us")
    spans_us = (streamed["last_token_us"] - streamed["first_token_us"]).sum()
    yield _ms(spans_us / (streamed["decoded_tokens"].sum() - len(streamed)) if len(streamed) else None)
    yield _ms(run.token_gap_us or decode_gap_us(done))
    yield _number(done["output_tokens_reported"].mean())
    yield _number(done["decoded_tokens"].mean())
    yield _share(done["output_tokens_reported"] == done["decoded_tokens"])
    yield _share(done["output_tokens"] == done["decoded_tokens"])
    yield _share(done["prompt_tokens"] == done["true_prompt_tokens"])


def clocks(run: ClientRun) -> Iterator[str]:
    """The cells of a run below ``CLOCKS``, but for its name: medians and, in brackets, the largest, in ms."""
    done = run.pairs.filter(pl.col("status") == "ok")
    end_us = done["arrival_us"] + done["e2e_us"]
    yield _spread(run.pairs["received_us"] - run.pairs["arrival_us"])
    yield _spread(done["arrival_us"] + done["ttft_us"] - done["first_token_us"])
    yield _spread(end_us - done["last_token_us"])
    yield _spread(end_us - done["end_us"])


def _ms(us: float | None) -> str:
    return "none" if us is None else f"{us / 1e3:.2f} ms"


def _number(value: object) -> str:
    return "none" if value is None else f"{value:.1f}"


def _share(right: pl.Series) -> str:
    return f"{100 * float(right.fill_null(False).mean()):.0f} %"  # type: ignore[arg-type]  # a mean of booleans


def _spread(us: pl.Series) -> str:
    known = us.drop_nulls()
    return "none" if known.is_empty() else f"{known.median() / 1e3:.2f} ({known.max() / 1e3:.1f})"  # type: ignore[operator]


def table_row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _head(names: Sequence[str]) -> list[str]:
    return [table_row(*names), table_row(*["---"] * len(names))]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
