"""Calibrations of synthetic servers whose coefficients are known: what the fits are worth, and their intervals.

Each server is recorded once with its noise and once without, and fitted as a user would.  Then it serves other loads
without noise, and so does the fit: what their means differ by is the true error, which no recording of a real server
can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import ExperimentError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import CorrectedModel, LatencyModel, RegimeModel
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named, table_of
from blis_replay.replay.executors import Progress, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.spread import missed_by, prediction_interval
from blis_replay.validate.fit.calibrate import DEFAULT_SPLIT, Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay_labs.planted.servers import Form, Noise, Server, any_server, between_stalls_us, run_of

# The bar: the true error of mean E2E on another load of the same server.
HELD_OUT = 0.01
SERVERS = 50
# From a smoke test to a day's load of a small service, evenly spaced in the logarithm.
_FEWEST, _MOST = 300, 16_800
_FIRST_SEED = 101
_FORMS: tuple[tuple[Form, tuple[int, ...]], ...] = (
    *(("line", ()), ("line", (16,)), ("line", (32,)), ("line", (64,)), ("line", (32, 64))),
    *(("without context", ()), ("without decodes", ()), ("floor", ()), ("attended", ()), ("two intercepts", ())),
)
_NOISES: tuple[Noise, ...] = ("none", "steps", "clients", "drift", "stalls", "steps", "clients")
_RECORDED_STEPS = (0.0, 0.1, 0.0)
# The other load is so deep, relative to the one that was recorded.
_OTHER_DEPTH = 0.75
# Draws of the coefficients of a fit, for the intervals of what it predicts.
_DRAWS = 24
# How the one number of the oracle is found: secant steps at most, and what is near enough.
_ORACLE_CALLS, _ORACLE_OFF = 8, 1e-4


@dataclass(frozen=True)
class KnownServer:
    """A server to be found again: its step time as ``form`` and ``bends``, and what of it is recorded."""

    form: Form
    bends: tuple[int, ...]
    server: Server

    @property
    def name(self) -> str:
        """``line``, or ``bent at 32 and 64 decodes``."""
        return f"bent at {' and '.join(map(str, self.bends))} decodes" if self.bends else self.form


def known_servers(count: int = SERVERS, most: int = _MOST) -> Iterator[KnownServer]:
    """Servers of all forms in turn, with 300 to ``most`` requests; the same for the same count."""
    requests = np.rint(np.geomspace(_FEWEST, most, count)).astype(int)
    # Sizes in an order in which each form has small ones and large ones.
    order = np.arange(count) * 7 % count
    for i, place in enumerate(order):
        form, bends = _FORMS[i % len(_FORMS)]
        server = any_server(_FIRST_SEED + i, bends, int(requests[place]), _NOISES[i % len(_NOISES)], form)
        yield KnownServer(form, bends, replace(server, steps=_RECORDED_STEPS[i % len(_RECORDED_STEPS)]))


@dataclass(frozen=True)
class KnownFit:
    """What came of a server: ``fitted``: the form that was chosen; true errors of means on other loads, as fractions.

    ``e2e``, ``ttft``: other arrivals and lengths at the same depth; ``other_e2e``: at three quarters of it.
    ``oracle_e2e``: the same error of one that knows the server, all but by how much its noise lengthened the steps: it
    has that from the mean E2E of what was fitted to.  No fit can know more.
    ``covered``: of the coefficients that are fitted with an interval and have a true value, how many bounds hold it, of
    ``bounded``.  ``predicted``: of the means of E2E and TTFT on both other loads, in how many of ``predictions`` the
    interval by draws of the coefficients holds the server's; ``width``: their median width, as a share.
    ``refused``: why nothing was fitted, or a fit would not be written.
    """

    form: str
    seed: int
    requests: int
    noise: str
    steps: float
    fitted: str
    e2e: float
    ttft: float
    other_e2e: float
    oracle_e2e: float
    covered: int
    bounded: int
    predicted: int
    predictions: int
    width: float
    missed_bounds: tuple[str, ...]
    refused: str

    @property
    def met(self) -> bool:
        """Whether it predicts the other draw of its load within the bar."""
        return not self.refused and abs(self.e2e) <= HELD_OUT

    @property
    def noise_met(self) -> bool:
        """Whether it does, or is off by no more than one that knows the server."""
        return self.met or (not self.refused and abs(self.e2e) <= abs(self.oracle_e2e))


def fit_known(known: KnownServer) -> KnownFit:
    """Record a server, calibrate, and hold the fit against the server on loads that it has not seen."""
    server = known.server
    head = (known.name, server.seed, server.requests, server.noise, server.steps)
    try:
        (fit,) = calibrate([run_of(server)], "fit", Options(load_release(DEFAULT_PRIOR)))[1]
    except ExperimentError as error:
        return KnownFit(*head, "-", np.nan, np.nan, np.nan, np.nan, 0, 0, 0, 0, np.nan, (), str(error))
    shallower = replace(server, depth=_OTHER_DEPTH * server.depth)
    e2e, ttft = _true_errors(server, fit.entry)
    other, other_ttft = _true_errors(shallower, fit.entry)
    drawn = fit.entry.draws(_DRAWS, server.seed) if fit.record.correlation else []
    by_draw = np.array([(*_true_errors(server, one), *_true_errors(shallower, one)) for one in drawn])
    between = _predicted(fit.record, (e2e, ttft, other, other_ttft), by_draw)
    held = {c.name: c for c in fit.record.coefficients if c.status == "fitted" and c.high_us > c.low_us}
    truth = _true_coefficients(known, fit.record.coefficients)
    both = [name for name in held if name in truth]
    missed = [(held[name], truth[name]) for name in both if not _holds(held[name], truth[name])]
    off = tuple(f"{fit.name} {us:.4g}, not {fit.low_us:.4g} to {fit.high_us:.4g}" for fit, us in missed)
    refused = "; ".join(fit.missed)
    errors = (e2e, ttft, other, _true_errors(server, _oracle(server))[0])
    return KnownFit(*head, fit.record.form, *errors, len(both) - len(off), len(both), *between, off, refused)


def _predicted(record: FitRecord, errors: tuple[float, ...], by_draw: Floats) -> tuple[int, int, float]:
    """How many intervals hold the server's number, of how many, and their median width; by signed errors."""
    misses = [missed_by(record, (metric, "mean")) for metric in ("e2e", "ttft")]
    found = [
        between
        for missed, error, drawn in zip(2 * misses, errors, by_draw.T, strict=False)
        if (between := prediction_interval(1 + error, (1 + drawn).tolist(), 0.0, missed)) is not None
    ]
    widths = [high - low for low, high in found]
    return sum(low <= 1 <= high for low, high in found), len(found), float(np.median(widths)) if widths else np.nan


def _oracle(server: Server) -> ModelEntry:
    """The server, with each step longer by the constant that gives the mean E2E of the fitted part."""
    seen = run_of(server)
    judged = seen.requests["arrival_us"].to_numpy() <= DEFAULT_SPLIT[1] * int(seen.requests["arrival_us"][-1])
    plan = plan_replay(seen, _mode(server))

    def entry(more_us: float) -> ModelEntry:
        at, none = np.zeros(1, np.int64), np.zeros(1, np.int64)
        latency = CorrectedModel(server.latency, (round(1000 * more_us), 0, 0, 0), at, none)
        return ModelEntry("oracle", 1, latency, server.lifecycle)

    def off(more_us: float) -> float:
        result = simulate(plan.trace, plan.engine, entry(more_us).latency, server.lifecycle)
        return float(result.e2e_us[judged].mean() / seen.requests["e2e_us"].to_numpy()[judged].mean() - 1)

    before_us, here_us = 0.0, between_stalls_us(server) / 100
    was, here = off(before_us), off(here_us)
    for _ in range(_ORACLE_CALLS if server.noise != "none" else 0):
        if was == here or abs(here) < _ORACLE_OFF:
            break
        before_us, here_us = here_us, here_us - here * (here_us - before_us) / (here - was)
        was, here = here, off(here_us)
    return entry(here_us if server.noise != "none" else 0.0)


def _mode(server: Server) -> ReplayMode:
    return ReplayMode(scheduling="asynchronous" if server.asynchronous else "synchronous")


def _true_errors(server: Server, entry: ModelEntry) -> tuple[float, float]:
    """Of the means of E2E and TTFT on another draw of the server's load."""
    truth = run_of(replace(server, noise="none", steps=0.0), draw=1)
    plan = plan_replay(truth, _mode(server))
    result = simulate(plan.trace, plan.engine, entry.latency, entry.lifecycle)
    seen = [truth.requests[name].to_numpy().mean() for name in ("e2e_us", "ttft_us")]
    return float(result.e2e_us.mean() / seen[0] - 1), float(result.ttft_us.mean() / seen[1] - 1)


def _holds(fit: CoefficientFit, value_us: float) -> bool:
    # A bound is rounded to a hundredth of the interval.
    slack = (fit.high_us - fit.low_us) / 100
    return fit.low_us - slack <= value_us <= fit.high_us + slack


def _true_coefficients(known: KnownServer, fitted: Sequence[CoefficientFit]) -> dict[str, float]:
    """The values that a fit should have found, us; none where the fitted form cannot have those of the server.

    Where another cost of a step is held at its prior, what is left is not what the server has, and not looked at.
    """
    latency, delay_us = known.server.latency, known.server.lifecycle.pre_queue_us
    # A robust fit does not count a stall into the cost of a step.
    empty = {"intercept": between_stalls_us(known.server)}
    names = [one.name for one in fitted]
    bends = tuple(int(name.rpartition("_")[2]) for name in names if name.startswith("per_decode_token_above_"))
    columns = ("intercept", "per_prefill_token", "per_context_token", "per_decode_token")
    if not set(known.bends) <= set(bends) or any(c.status == "prior" and c.name in columns for c in fitted):
        return {}
    if isinstance(latency, RegimeModel):
        if known.form == "two intercepts":
            return {}
        return _of_bent(latency, known.bends, bends) | {"pre_queue": delay_us} | empty
    if known.form in ("floor", "attended"):
        return {}
    costs = _of_line(latency)
    above = {f"per_decode_token_above_{bend}": costs["per_decode_token"] for bend in bends}
    return costs | above | {"pre_queue": delay_us} | empty


def _of_line(latency: LatencyModel) -> dict[str, float]:
    return {
        "intercept": latency.intercept_ns / 1000,
        "per_prefill_token": latency.per_prefill_token_ns / 1000,
        "per_context_token": latency.per_context_token_ns / 1000,
        "per_decode_token": latency.per_decode_token_ns / 1000,
    }


def _of_bent(latency: RegimeModel, true: tuple[int, ...], fitted: tuple[int, ...]) -> dict[str, float]:
    regimes = [dict(regime.coefficients) for regime in latency.regimes]
    context = regimes[0]["kv_sum"]
    slopes = [regime["decode_tokens"] - context for regime in regimes]
    found = {
        "intercept": latency.regimes[0].intercept_us,
        "per_prefill_token": regimes[0]["prefill_tokens"],
        "per_context_token": context,
        "per_decode_token": slopes[0],
    }
    return found | {f"per_decode_token_above_{bend}": slopes[sum(at <= bend for at in true)] for bend in fitted}


@dataclass(frozen=True)
class KnownFits:
    """``noisy``: the servers as they are, some of them without noise; ``noise_free``: all of them without any."""

    noisy: tuple[KnownFit, ...]
    noise_free: tuple[KnownFit, ...]


def fit_all(quick: bool = False, progress: Progress | None = None) -> KnownFits:
    """All servers, with their noise and without; ``quick``: a fifth of them, and none with more than 1,000 requests."""
    servers = list(known_servers(SERVERS // 5, 1_000) if quick else known_servers())
    without = [replace(known, server=replace(known.server, noise="none")) for known in servers]
    jobs = list(dict.fromkeys([*without, *servers]))
    fits = dict(zip(jobs, map_jobs(fit_known, jobs, progress=progress), strict=True))
    return KnownFits(tuple(fits[known] for known in servers), tuple(fits[known] for known in without))


_COLUMNS = (
    Column("step time", "text"),
    *columns_named("requests", "steps", kind="count"),
    Column("noise", "text"),
    *columns_named("E2E", "TTFT", "other load", "oracle", kind="error"),
    Column("bounds hold", "word"),
    Column("fitted as", "text", below=True),
    Column("not met", "text", below=True),
)


def known_answer(fits: KnownFits) -> Answer:
    """A row a server, and how many meet the bar, with noise and without; times in us, errors as fractions.

    It fails where a fit without noise misses the bar, or one with noise does by more than its noise explains.
    """
    noise_free, noisy = _Group("servers without noise", fits.noise_free), _Group("servers with noise", fits.noisy)
    page: list[Part] = []
    for group in (noise_free, noisy):
        page += [Table(group.name, _COLUMNS, [_cells(fit) for fit in group.fits]), Block(group.lines)]
    # The same server is in both lists where it has no noise.
    records = dict.fromkeys(
        tuple((asdict(fit) | {"missed_bounds": " | ".join(fit.missed_bounds)}).items())
        for fit in (*fits.noisy, *fits.noise_free)
    )
    document = noisy.document | {"noise_free": noise_free.document}
    exit_code = 0 if noise_free.met == len(fits.noise_free) and noisy.met_or_noise == len(fits.noisy) else 1
    return Answer(page, document, table_of([dict(record) for record in records]), exit_code=exit_code)


@dataclass(frozen=True)
class _Group:
    """Fits that are counted together."""

    name: str
    fits: Sequence[KnownFit]

    @property
    def met(self) -> int:
        return sum(fit.met for fit in self.fits)

    @property
    def met_or_noise(self) -> int:
        return sum(fit.noise_met for fit in self.fits)

    @property
    def bounds(self) -> tuple[int, int]:
        """How many hold the true coefficient, of how many."""
        return sum(fit.covered for fit in self.fits), sum(fit.bounded for fit in self.fits)

    @property
    def predictions(self) -> tuple[int, int, float]:
        """How many intervals of predicted means hold the server's, of how many, and their median width."""
        widths = [fit.width for fit in self.fits if not np.isnan(fit.width)]
        held, count = sum(fit.predicted for fit in self.fits), sum(fit.predictions for fit in self.fits)
        return held, count, float(np.median(widths)) if widths else float("nan")

    @property
    def lines(self) -> list[Line]:
        worst = max((abs(fit.e2e) for fit in self.fits if not np.isnan(fit.e2e)), default=float("nan"))
        covered, bounded = self.bounds
        held, count, width = self.predictions
        share = covered / bounded if bounded else float("nan")
        of = f"{self.met} of {len(self.fits)} {self.name}"
        oracle = "are off by no more than one that knows the server but for its noise (oracle)"
        others = [Line(f"{self.met_or_noise - self.met} of the others {oracle}")]
        return [
            Line(f"{of}: mean E2E of another load within {HELD_OUT:.0%} (worst {worst:.2%})"),
            *(others if any(fit.noise != "none" for fit in self.fits) else ()),
            Line(f"{covered} of {bounded} bounds of 95 % hold the true coefficient ({share:.0%})"),
            Line(f"{held} of {count} intervals of means predicted of other loads hold the server's"),
            Line(f"their median width is {width:.1%}"),
        ]

    @property
    def document(self) -> dict[str, object]:
        covered, bounded = self.bounds
        servers = [asdict(fit) for fit in self.fits]
        held, count, width = self.predictions
        predicted = {"held": held, "of": count, "median_width": width}
        return {"servers": servers, "met": self.met, "covered": covered, "bounded": bounded, "predicted": predicted}


def _cells(fit: KnownFit) -> list[Cell]:
    shown = [None if np.isnan(value) else value for value in (fit.e2e, fit.ttft, fit.other_e2e, fit.oracle_e2e)]
    steps = f"{fit.steps:.0%}" if fit.steps else "-"
    held = f"{fit.covered} of {fit.bounded}" if fit.bounded else "-"
    tone = Toned(held, "good" if fit.noise_met else "bad")
    return [fit.form, f"{fit.requests:,}", steps, fit.noise, *shown, tone, fit.fitted, fit.refused]
