"""Requests that client and server both recorded, paired: what that says of the two clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.scratch import Scratch

# What only a server measures of a request.
SERVER_COLUMNS = ("queue_us", "prefill_us", "decode_us", "cached_prompt_tokens")
_FEWEST = 2
# The API server puts this before a client's id, and the engine these behind (prompt number, random hex).
_PREFIX, _SUFFIX = "^(?:chat)?cmpl-", r"-\d+(?:-[0-9a-f]{8})?$"
# vLLM's benchmark client sends ids that count its requests, and writes its result in that order without them.
_NUMBERED = r"^(?:chat)?cmpl-(.*?)(\d{1,9})-\d+(?:-[0-9a-f]{8})?$"

BY_IDS, BY_NUMBERS, BY_CONTENT = "their ids", "the numbers in their ids", "their lengths and the pattern of arrivals"
BY_CLOCK = "their lengths and the clock that both read"
# Share of pairs by numbers with equal prompt lengths, where both sides count them.  All may differ by the same
# tokens, which a server puts before a prompt.
_AGREE = 0.95
# Runs of one client are as far from the server's clock, but for how long a first request takes on its way.
_ONE_CLOCK_US = 2_000_000
# Pairing by lengths and arrivals: requests of the client, and pairs with the server's, that are looked at.
_SAMPLED = 400
_MOST_PAIRS = 400_000
_FEWEST_ALIKE = 8
# A busy API server takes that long to look at a request; requests of one sample that lie within it fit together.
_WINDOW_US = 100_000
_FITTING = 0.8  # share of the sample that must fit one offset
_NEXT_BEST = 0.5  # share of those that may fit a second offset; with more it is ambiguous
_LATEST_US = 5_000_000


@dataclass(frozen=True)
class Alignment:
    """The server's clock less the client's: between ``low_us`` and ``high_us``, by ``pairs`` requests.

    A server has a request after its client sent it, and its first token before the client has it: each pair bounds the
    offset from both sides.  (Ends tell less: a server may note that it is done after the client has the last token.)
    Bounds that cross (``low_us`` above ``high_us``) mean clocks that drift, or ids that are not of the same requests.
    ``clock_kind``: of the server (epoch | monotonic).
    """

    low_us: int
    high_us: int
    pairs: int
    clock_kind: str

    def offset_us(self, stamped_us: int | None) -> int:
        """What the stamps say (``stamped_us``) if the bounds allow it, else the middle of the bounds."""
        if stamped_us is not None and self.low_us <= stamped_us <= self.high_us:
            return stamped_us
        return (self.low_us + self.high_us) // 2

    def uncertainty_us(self, offset_us: int) -> int:
        """How far the true offset can be from this one; at least a microsecond."""
        return max(abs(self.high_us - offset_us), abs(offset_us - self.low_us), 1)

    @property
    def crossed(self) -> bool:
        """Whether no constant offset agrees with every pair."""
        return self.low_us > self.high_us


@dataclass(frozen=True)
class Pairing:
    """The client's requests with what the server measured of them, and which are which.

    ``frame``: ``READ_SCHEMA``, the client's rows in their order.  ``client_rows``: int64, by row of the server's
    requests the row of the client's, or -1.  ``how``: what they were paired by, ``""`` if nothing
    tells.  ``alignment``: how the clocks lie, None if they were not paired.
    """

    frame: pl.DataFrame
    client_rows: Int64s
    how: str
    alignment: Alignment | None


def paired(
    client: pl.DataFrame,
    server: pl.DataFrame,
    clock_kind: str,
    one_clock: bool = False,
    files: NDArray[np.str_] | None = None,
    alike: bool = False,
) -> Pairing:
    """Pair requests by their ids, else by what is unique of them; at least two pairs, or none.

    ``files``: str[client], the client's file of each, None if they are of one.  Both are ``READ_SCHEMA``, each on its
    own clock; ``clock_kind`` is the server's.  Ids that occur twice on a side tell nothing.  Where ids differ, the
    numbers in the server's ids count the requests of a client's run in the order of its file, if the prompts agree.
    Else lengths and the pattern of arrivals decide, if exactly one offset between the clocks fits.  ``one_clock``:
    both may have read the monotonic clock of one host, which holds if nearly every request then came right after it
    was sent.  ``alike``: both have read clocks of one kind, which are hardly apart.
    """
    numbered = partial(_by_numbers, _runs(client, files), alike)
    ways: dict[str, Callable[[pl.DataFrame, pl.DataFrame], Int64s]]
    ways = {BY_IDS: _by_ids, BY_NUMBERS: numbered, BY_CLOCK: _by_clock, BY_CONTENT: _by_content}
    for how, rows_of in ways.items():
        if how == BY_CLOCK and not one_clock:
            continue
        rows = rows_of(client, server)
        if (rows >= 0).sum() >= _FEWEST:
            joined = _joined(client, server, rows)
            columns = [pl.coalesce(name, f"{name}_server").alias(name) for name in SERVER_COLUMNS]
            return Pairing(
                joined.with_columns(columns).select(client.columns), rows, how, _alignment(joined, clock_kind)
            )
    return Pairing(client, np.full(server.height, -1, np.int64), "", None)


def _joined(client: pl.DataFrame, server: pl.DataFrame, rows: Int64s) -> pl.DataFrame:
    columns = ("sent_us", "ttft_us", *SERVER_COLUMNS)
    named = server.select(pl.col(name).alias(f"{name}_server") for name in columns)
    of_server = named.with_columns(pl.Series("row", rows)).filter(pl.col("row") >= 0)
    numbered = client.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("row"))
    return numbered.join(of_server, on="row", how="left", maintain_order="left")


def _by_ids(client: pl.DataFrame, server: pl.DataFrame) -> Int64s:
    known = client.with_row_index("row").select("row", pl.col("request_id").alias("id")).drop_nulls()
    plain = pl.col("id").str.replace(_PREFIX, "")
    known = known.filter(~pl.col("id").is_duplicated()).with_columns(plain).filter(~pl.col("id").is_duplicated())
    own = pl.col("request_id").str.replace(_PREFIX, "")
    rows = []
    for name in (own, own.str.replace(_SUFFIX, "")):
        found = server.select(name.alias("id")).join(known, on="id", how="left", maintain_order="left")
        rows.append(found["row"])
    return _once(pl.DataFrame({str(i): series for i, series in enumerate(rows)}).select(pl.coalesce(pl.all())))


def _runs(client: pl.DataFrame, files: NDArray[np.str_] | None) -> list[tuple[int, int]]:
    """First row and end of each run of a client: a file, or a load stage of one."""
    stage = client["stage"].fill_null(-1).to_numpy()
    begins = np.ones(client.height, np.bool_)
    begins[1:] = stage[1:] != stage[:-1]
    if files is not None and len(files) == client.height:
        begins[1:] |= files[1:] != files[:-1]
    return list(pairwise([*np.flatnonzero(begins).tolist(), client.height]))


def _by_numbers(runs: list[tuple[int, int]], alike: bool, client: pl.DataFrame, server: pl.DataFrame) -> Int64s:
    """The server's row whose id has number n is the n-th of a run of the client's, by the beginning of such ids.

    Each run of ``vllm bench serve`` begins its ids anew and numbers from 0.  The prompts say which
    beginning is which run's, and so do the clocks: all runs of a client are equally far from the server's.  Where
    another distance fits as many requests, it is the shorter one of clocks that are ``alike``, and else not known.
    """
    ids = pl.col("request_id")
    parts = server.select(
        ids.str.extract(_NUMBERED, 1).alias("begin"), ids.str.extract(_NUMBERED, 2).cast(pl.Int64).alias("number")
    )
    if client["request_id"].null_count() < client.height:
        return _nothing(server)
    fits: list[tuple[int, Int64s]] = []
    # An id that is random may end in digits as well, but no two begin alike.
    begins = parts.drop_nulls().group_by("begin").len().filter(pl.col("len") >= _FEWEST)["begin"].sort()
    for begin, run in product(begins, runs):
        own = (pl.col("begin") == begin) & (pl.col("number") < run[1] - run[0])
        rows = _once(parts.select(pl.when(own).then(pl.col("number") + run[0])))
        pairs = rows >= 0
        of, by = server.filter(pairs), client[rows[pairs]]
        more = (of["prompt_tokens"] - by["prompt_tokens"]).drop_nulls()
        if len(more) > 0 and int((more == more.mode()[0]).sum()) >= _AGREE * int(pairs.sum()):
            ahead_us = (of["sent_us"] - by["sent_us"]).min()
            fits.append((0 if ahead_us is None else int(ahead_us), rows))  # type: ignore[arg-type]  # integers
    fits.sort(key=lambda fit: (-int((fit[1] >= 0).sum()), abs(fit[0])))
    tries = [
        (one, _together([rows for ahead_us, rows in fits if abs(ahead_us - one) <= _ONE_CLOCK_US])) for one, _ in fits
    ]
    most = max((int((rows >= 0).sum()) for _, rows in tries), default=0)
    best = sorted(((one, rows) for one, rows in tries if (rows >= 0).sum() == most), key=lambda fit: abs(fit[0]))
    if not best or (not alike and abs(best[-1][0] - best[0][0]) > _ONE_CLOCK_US):
        return _nothing(server)
    return best[0][1]


def _together(fits: Sequence[Int64s]) -> Int64s:
    """Rows of the first fit, with those of each further one that has no request of an earlier one."""
    rows = fits[0].copy()
    for other in fits[1:]:
        new = other >= 0
        if not (rows[new] >= 0).any() and not np.isin(other[new], rows).any():
            rows[new] = other[new]
    return rows


def _once(rows: pl.DataFrame) -> Int64s:
    """One column of rows as int64, -1 where it is null or a row occurs twice."""
    name = rows.columns[0]
    single = pl.when(~pl.col(name).is_duplicated()).then(pl.col(name)).fill_null(-1)
    chosen: Int64s = rows.select(single.cast(pl.Int64)).to_series().to_numpy()
    return chosen


def _nothing(server: pl.DataFrame) -> Int64s:
    return np.full(server.height, -1, np.int64)


def _by_clock(client: pl.DataFrame, server: pl.DataFrame) -> Int64s:
    """By prompt and output length, each the first of its kind that came after it was sent."""
    key = ["prompt_tokens", "output_tokens_reported"]
    mine = _keyed(client, key)
    rows = _cut_off(client, server, 0, _in_turn(mine, _keyed(server, key), 0, _nothing(server)))
    return rows if (rows >= 0).sum() >= _AGREE * max(mine.height, 1) else _nothing(server)


def _cut_off(client: pl.DataFrame, server: pl.DataFrame, offset_us: int, rows: Int64s) -> Int64s:
    """``rows`` filled with those that the server had not ended when its record ends: of them only prompts are known."""
    key, left = ["prompt_tokens"], np.ones(client.height, bool)
    left[rows[rows >= 0]] = False
    unended = pl.Series(rows < 0) & (server["status"] != "ok")
    mine = _keyed(client.with_columns(status=pl.when(pl.Series(left)).then("status")), key)
    others = _keyed(server.with_columns(status=pl.when(unended).then(pl.lit("ok"))), key)
    return _in_turn(mine, others, offset_us, rows)


def _by_content(client: pl.DataFrame, server: pl.DataFrame) -> Int64s:
    """By prompt and output length and the arrivals' pattern, else by output length, else by the pattern alone."""
    keys: tuple[list[str], ...] = (["prompt_tokens", "output_tokens_reported"], ["output_tokens_reported"], [])
    for key in keys:
        mine, others = _keyed(client, key), _keyed(server, key)
        offset_us = _offset_of_arrivals(mine, others)
        if offset_us is None:
            continue
        rows = _in_turn(mine, others, offset_us, _nothing(server))
        # A few that fit are chance: one side may have requests that the other has not, but not both.
        if (rows >= 0).sum() >= max(_AGREE * min(mine.height, others.height), 1):
            return _cut_off(client, server, offset_us, rows)
    return _nothing(server)


def _keyed(requests: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """``row``, ``sent_us`` and ``key`` (a number per combination of lengths) of served requests that have them all."""
    numbered = requests.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("row"))
    known = numbered.filter(pl.col("status") == "ok").drop_nulls(["sent_us", *key])
    hashed = pl.struct(key).hash() if key else pl.lit(0, pl.UInt64)
    return known.select("row", "sent_us", hashed.alias("key")).sort("sent_us")


def _in_turn(client: pl.DataFrame, server: pl.DataFrame, offset_us: int, rows: Int64s) -> Int64s:
    """``rows`` filled: of equal keys, each of the server's is the next of the client's that was sent before."""
    of_server = {key[0]: part.select("row", "sent_us").to_numpy() for key, part in server.group_by("key")}
    for key, part in client.group_by("key"):
        others = of_server.get(key[0])
        if others is None:
            continue
        at = 0
        for row, sent_us in part.select("row", "sent_us").iter_rows():
            while at < len(others) and others[at, 1] < sent_us + offset_us:
                at += 1
            if at < len(others) and others[at, 1] <= sent_us + offset_us + _LATEST_US:
                rows[others[at, 0]] = row
                at += 1
    return rows


def _offset_of_arrivals(client: pl.DataFrame, server: pl.DataFrame) -> int | None:
    """The least that the server's clock is ahead of the client's, or None if no offset, or a second one, fits."""
    counted = server.group_by("key").agg(pl.len().alias("others"))
    known = client.join(counted, on="key").sort("others", "row")
    sample = known.head(_SAMPLED).filter(pl.col("others").cum_sum() <= _MOST_PAIRS)
    if sample.height < _FEWEST_ALIKE:
        return None
    pairs = sample.join(server, on="key", suffix="_server")
    ahead = pairs.select("row", (pl.col("sent_us_server") - pl.col("sent_us")).alias("us")).sort("us")
    us = ahead["us"].to_numpy()
    fitting = np.searchsorted(us, us + _WINDOW_US, side="right") - np.arange(len(us))
    best = int(np.argmax(fitting))
    distinct = ahead["row"].slice(best, int(fitting[best])).n_unique()
    elsewhere = fitting[np.abs(us - us[best]) > 2 * _WINDOW_US]
    if distinct < _FITTING * sample.height or elsewhere.max(initial=0) > _NEXT_BEST * distinct:
        return None
    return int(us[best])


def _alignment(joined: pl.DataFrame, clock_kind: str) -> Alignment | None:
    """The bounds over all pairs: sends bound from above, first tokens from below."""
    begun = pl.col("sent_us_server") - pl.col("sent_us")
    bounds = joined.filter(pl.col("sent_us_server").is_not_null()).select(
        begun.min().alias("high"),
        (begun + pl.col("ttft_us_server") - pl.col("ttft_us")).max().alias("low"),
        pl.len().alias("pairs"),
    )
    high, low, pairs = bounds.row(0)
    return None if high is None or low is None else Alignment(int(low), int(high), int(pairs), clock_kind)


def with_request_indices(lifecycles: Rows, requests: Rows, scratch: Scratch) -> Rows:
    """The lifecycles with ``request_index``, by the ids that client and server share, in ``scratch``.

    The API server prefixes a client's ``X-Request-Id`` with ``cmpl-`` or ``chatcmpl-``.  An id
    that occurs twice tells nothing.
    """
    # By hashes of 64 bits, as ids themselves would take several times the memory; a cast column does not keep them.
    named = (batch.drop_nulls("request_id") for batch in requests.batches(["request_id", "request_index"]))
    index = pl.col("request_index").cast(pl.UInt32)
    ids = pl.concat(batch.select(index, id=pl.col("request_id").hash()) for batch in named)
    ids = ids.filter(pl.col("id").is_unique())
    return scratch.gathered(LIFECYCLE_SCHEMA, (_indexed(batch, ids) for batch in lifecycles.batches()))


def _indexed(lifecycles: pl.DataFrame, ids: pl.DataFrame) -> pl.DataFrame:
    """The lifecycles with the ``request_index`` of the first of their ids that a request has."""
    of_api = pl.col("api_request_id")
    asked = (of_api, of_api.str.replace(_PREFIX, ""), pl.col("core_request_id"))
    found = []
    for name in asked:
        # A hash of no text would be one as well.
        hashes = lifecycles.select(id=pl.when(name.is_not_null()).then(name.hash()))
        found.append(hashes.join(ids, on="id", how="left", maintain_order="left")["request_index"])
    return lifecycles.with_columns(pl.coalesce(found).cast(pl.Int64).alias("request_index"))
