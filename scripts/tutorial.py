"""A tour in Python: from a recording to the sentence that names the cause.

    python scripts/tutorial.py            # runs in CI; every number that it prints comes from the call above it

The same steps work in a notebook, line by line.  It uses an experiment that ships; for your own
recording, put ``br.ingest("runs/my-run")`` first and its name in the place of ``34b-general``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import polars as pl

import blis_replay.validate as br


def main(store: Path) -> None:
    """Walk through one experiment; ``store``: a file that may not exist yet, what is made stands beside it."""
    print("0. What is there, and can it be trusted?")
    print(br.experiments(store).frame.select("alias", "requests", "overloaded").head(3))
    print(br.inspect("34b-general", store).frame.filter(pl.col("severity") == "corrected").select("check", "message"))

    print("1. How far is the simulator from the server?")
    means = br.validate("34b-general", store=store).frame.filter(pl.col("statistic") == "mean")
    print(means.select("metric", "observed_ms", "simulated_ms", "error"))

    print("2. The same with synchronous scheduling, as many simulators have it:")
    synchronous = br.validate("34b-general", replay="scheduling=synchronous", store=store).frame
    print(synchronous.filter(pl.col("statistic") == "mean").select("metric", "observed_ms", "simulated_ms", "error"))

    print("3. Where does that error come from?")
    parts = br.attribute("34b-general", replay="scheduling=synchronous", store=store).frame
    print(parts.filter((pl.col("metric") == "ttft") & (pl.col("statistic") == "mean")).select("part", "share_us"))

    print("4. The same as a picture, and as a page for others:")
    causes = br.figure("34b-general", "attribution", replay="scheduling=synchronous", store=store)
    causes.save(store.with_name("causes.svg"))
    page = br.report_page(
        "34b-general", replay="scheduling=synchronous", out=store.with_name("report.html"), store=store
    )
    print(causes.description, page.verdicts)

    print("5. What did the simulated server do?  Its batches by number of decodes:")
    batches = br.steps("34b-general", store=store).with_columns(cycle_us=pl.col("end_us") - pl.col("start_us"))
    tens = (pl.col("decode_tokens") // 20 * 20).alias("decodes_from")
    print(batches.group_by(tens).agg(pl.len(), pl.col("cycle_us").mean()).sort("decodes_from"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "store.duckdb")
