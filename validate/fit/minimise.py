"""The search engine: coefficients with the least robust squares of simulated residuals, and their bounds.

A simulated run is a step function of its coefficients: which step a request just catches is chance.  So slopes come
from planes through many runs around a point, in which chance averages out.  Each kind of residual is weighed by its
own scatter: a mean TTFT scatters far more than a mean E2E.

Constants that name no other origin recover synthetic servers of known coefficients: 44 of 50 within 1 %
(``blis-replay verify --calibration``).  Lengths are in probes, residuals in the unit of their kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.validate.metrics.resampling import RESAMPLES, interval, resampled, row_blocks, spread

Residuals = Callable[[Floats], Floats]

# Scale of Cauchy's loss: residuals above this many times the scatter of their kind count less and less.
_TAIL = 3.0
# Least scatter of a kind: as many coefficients as rows would leave none.
_LEAST_SCALE = 0.05
# Fewest rows per coefficient that determine the scatter of a kind.
_ROWS = 4
# Median of the absolute value of a standard normal variable.
_NORMAL_MEDIAN = 0.6745

# Radius of the runs around a point where a search begins.
_RADIUS = 2.0
_LARGEST_RADIUS = 8.0
# Radius where a search ends.  Below ROUGH, runs differ more by chance than by the change of the coefficients.
ROUGH = 0.5
FINE = 0.1
# Most planes of a search; it ends by its radius long before.
_MOST_ROUNDS = 40
# Final search: radius of its planes, burn-in steps, and steps that are averaged.
_WIDE_RADIUS = 2.0
_BURN_IN = 2
_AVERAGED = 8
# Longest step, in radii: slopes hold a little beyond the runs that they were taken from.
_REACH = 12.0
# Dampings of a step (Levenberg and Marquardt), as shares of the diagonal; the first that lowers the cost is taken.
_DAMPINGS = (1e-6, 1e-3, 1e-2, 1e-1, 1.0)
# Largest slope per probe that is rounding: no run shows the coefficient.
_ROUNDING = 1e-9
# A probe is scaled until the mean change of a kind of residual lies between these.
_LEAST_SHOWN = 0.5
_MOST_SHOWN = 2.0
# Change of one residual above which it is chance: a request that just misses a step.
_CLEAR = 10.0
# Mean change below which no residual follows a probe, however long.
_NOTHING = 1e-3
# Most trials to scale a probe, each by at most a factor of ten.
_PROBE_TRIES = 8
# Share of the least cost within which the end of a search from another start is as good.
_AS_GOOD = 0.10
# Least share of the squares in a direction that is not called chance of the slopes.
_LEAST_KNOWN = 0.1
# Condition of the squares of one kind of rows above which they tell nothing alone.
_SINGULAR = 1e14


@dataclass(frozen=True)
class Minimum:
    """Where the search ended.

    ``vector``: float64[coefficients]; ``residuals``: float64[rows]; ``scales``: float64[rows], the scatter of the kind
    of each.  ``slopes``: float64[planes, rows, coefficients], change of a residual per unit of a coefficient, by each
    plane there.  ``ends``: float64[k, coefficients], of all searches that came as low.  ``scatter``:
    float64[coefficients], standard error of the end of the search.
    """

    vector: Floats
    residuals: Floats
    scales: Floats
    slopes: Floats
    ends: Floats
    scatter: Floats


def losses(residuals: Floats) -> Floats:
    """float64[rows]: Cauchy's loss of residuals over their scales, so that a one-second stall distorts no step cost."""
    return np.asarray(_TAIL**2 * np.log1p((residuals / _TAIL) ** 2), np.float64)


def robust_cost(residuals: Floats) -> float:
    """The sum of ``losses``."""
    return float(losses(residuals).sum())


def weights(residuals: Floats) -> Floats:
    """float64[rows]: weights of squares that have the gradient of ``losses``."""
    return np.asarray(1 / (1 + (residuals / _TAIL) ** 2), np.float64)


def scales_of(residuals: Floats, kinds: Int64s, coefficients: int) -> Floats:
    """float64[rows]: the scatter of each kind, by its median absolute deviation from 0.

    At most 1, or a kind that is far off would count for nothing; 1 for a kind with too few rows.
    """
    scales = np.ones(len(residuals))
    for kind in np.unique(kinds):
        rows = kinds == kind
        if np.count_nonzero(rows) >= _ROWS * coefficients:
            scatter = float(np.median(np.abs(residuals[rows]))) / _NORMAL_MEDIAN
            scales[rows] = min(max(scatter, _LEAST_SCALE), 1.0)
    return scales


def minimise(
    residuals: Residuals, starts: Sequence[Floats], probe: Floats, free: Bools, kinds: Int64s, least_radius: float
) -> Minimum:
    """The least robust cost with non-negative coefficients, from the best of ``starts`` and then from the others.

    ``probe``: float64[coefficients], a change of each that the residuals may show.  ``free``: which may move.
    ``kinds``: int64[rows], the kind of each residual.  ``least_radius``: how fine to search.  Deterministic.
    """
    search = _Search(residuals, probe, np.flatnonzero(free), kinds)
    first = [search.at(start) for start in starts]
    scales = scales_of(first[0], kinds, len(search.free))
    order = np.argsort([robust_cost(r / scales) for r in first], kind="stable")
    ended = [search.from_(starts[i], _RADIUS, ROUGH) for i in order.tolist()]
    scales = scales_of(ended[0][1], kinds, len(search.free))
    costs = np.array([robust_cost(r / scales) for _, r, _ in ended])
    vector, r, slopes = ended[int(np.argmin(costs))]
    scatter, planes = np.zeros(len(vector)), slopes[None]
    as_good = costs <= costs.min() * (1 + _AS_GOOD) + 1e-9
    if least_radius < ROUGH and len(search.free):
        settled = search.settled(vector)
        if search.as_low(settled[0], vector):
            vector, r, planes, scatter = settled
        else:
            # Where residuals have a kink and no plane there is nothing to settle on.
            vector, r, slopes = search.from_(vector, ROUGH, least_radius)
            planes = slopes[None]
    scales = scales_of(r, kinds, len(search.free))
    return Minimum(
        vector=vector,
        residuals=r,
        scales=scales,
        slopes=planes,
        ends=np.array([vector, *(x for (x, _, _), good in zip(ended, as_good, strict=True) if good)]),
        scatter=scatter,
    )


def level(residuals: Residuals, x: Floats, probe: Floats, free: Bools, kinds: Int64s) -> Floats:
    """float64[rows]: residuals as the mean of runs around ``x``, so that one lucky run does not count."""
    search = _Search(residuals, probe, np.flatnonzero(free), kinds)
    if not len(search.free):
        return residuals(x)
    search.probe = search.fitted_probe(x, search.at(x))
    return search.plane(x, ROUGH)[0]


def agreed(values: Floats, units: Floats) -> Floats:
    """``values`` to a hundred-thousandth of their ``units`` (above 0), or finer: the digits on which processors agree.

    The last digits of linear algebra differ between processors, and a search through a step function would end
    elsewhere.  So a search only looks at points of this grid.
    """
    places = [5 - math.floor(math.log10(unit)) for unit in units.tolist()]
    return np.array([round(value, place) for value, place in zip(values.tolist(), places, strict=True)])


class _Search:
    """The residuals ``at`` a point, and moves from point to point."""

    def __init__(self, residuals: Residuals, probe: Floats, free: NDArray[np.intp], kinds: Int64s) -> None:
        self.at, self.probe, self.free, self.kinds = residuals, probe, free, kinds
        self.signs = _two_levels(len(free))

    def moved(self, x: Floats, by: Floats) -> Floats:
        """``x`` with its free coefficients changed by ``by`` probes, none below 0."""
        moved = x.copy()
        probe = self.probe[self.free]
        moved[self.free] = agreed(np.maximum(x[self.free] + by * probe, 0), probe)
        return moved

    def from_(self, x: Floats, radius: float, least_radius: float) -> tuple[Floats, Floats, Floats]:
        """Where a search from ``x`` ends: the vector, its residuals, their slopes per unit of a coefficient."""
        r, shown = self.at(x), np.zeros((0, 0))
        self.probe = self.fitted_probe(x, r)
        for _ in range(_MOST_ROUNDS if len(self.free) else 0):
            smooth, slopes = self.plane(x, radius)
            shown = slopes if radius >= ROUGH else shown
            x, r, length, gain = self.step(x, r, smooth, slopes, radius)
            if length > 2 * radius and gain > 0:
                radius = min(2 * radius, _LARGEST_RADIUS)
            elif length < radius / 2 or gain < 0.02:
                radius /= 2
            if radius < least_radius:
                break
        per_unit = np.zeros((len(r), len(x)))
        if len(self.free):
            per_unit[:, self.free] = shown / self.probe[self.free]
        return x, r, per_unit

    def fitted_probe(self, x: Floats, r: Floats) -> Floats:
        """The probes, longer or shorter, so that the residuals of a kind show each of them."""
        probe = self.probe.copy()
        for i in self.free:
            seen = 0.0
            for _ in range(_PROBE_TRIES):
                moved = x.copy()
                moved[i] += probe[i]
                change = np.minimum(np.abs(self.at(moved) - r), _CLEAR)
                seen = max(float(change[self.kinds == kind].mean()) for kind in np.unique(self.kinds))
                if _LEAST_SHOWN <= seen <= _MOST_SHOWN:
                    break
                probe[i] *= min(max(1 / max(seen, _NOTHING), 0.1), 10.0)
            if seen < _NOTHING:
                # However far it is moved, no residual follows: a longer probe would be a number without meaning.
                probe[i] = self.probe[i]
        return agreed(probe, probe)

    def plane(self, x: Floats, radius: float) -> tuple[Floats, Floats]:
        """Residuals, float64[rows], and slopes per probe, float64[rows, free], of a plane through runs around x."""
        near = [self.moved(x, radius * signs) for signs in self.signs]
        moves = np.array([(y - x)[self.free] / self.probe[self.free] for y in near])
        design = np.column_stack([np.ones(len(near)), moves])
        plane = np.linalg.lstsq(design, np.array([self.at(y) for y in near]), rcond=None)[0]
        slopes = plane[1:].T
        slopes[:, np.abs(slopes).max(axis=0, initial=0) < _ROUNDING] = 0
        return plane[0], slopes

    def as_low(self, x: Floats, other: Floats) -> bool:
        """Whether ``x`` is as good as another point: by means of runs around them, as one run can be lucky."""
        at_x, at_other = (self.plane(point, ROUGH)[0] for point in (x, other))
        scales = scales_of(at_other, self.kinds, len(self.free))
        return robust_cost(at_x / scales) <= (1 + _AS_GOOD) * robust_cost(at_other / scales)

    def settled(self, x: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """The final search: vector, mean residuals around it, slopes of each plane, standard error of the vector.

        Slopes (per unit of a coefficient) come from wide planes, levels from narrow ones.  Where a queue builds up,
        residuals are curved: their mean over a wide plane is not their level in its middle.  Steps remain noisy.
        After the burn-in the point is the mean of the goals of all steps so far (Robbins and Monro 1951).
        """
        points, levels, goals, planes = [], [], [], list[Floats]()
        for turn in range(_BURN_IN + _AVERAGED):
            planes.append(self.plane(x, _WIDE_RADIUS)[1])
            level, slopes = self.plane(x, ROUGH)[0], np.mean(planes, axis=0)
            scales = scales_of(level, self.kinds, len(self.free))
            square, gradient = _normal_equations(slopes / scales[:, None], level / scales)
            by = _bounded_step(square, gradient, _DAMPINGS[0], x[self.free] / self.probe[self.free])
            by *= min(1.0, _REACH * _WIDE_RADIUS / max(float(np.abs(by).max()), 1e-9))
            if turn >= _BURN_IN:
                points.append(x)
                levels.append(level)
                goals.append(self.moved(x, by))
            x = self.moved(x, by / max(turn - _BURN_IN + 1, 1))
        each = np.array(planes)
        moves = [(x - point)[self.free] / self.probe[self.free] for point in points]
        at = [level + each.mean(axis=0) @ move for level, move in zip(levels, moves, strict=True)]
        per_unit = np.zeros((len(each), len(at[0]), len(x)))
        per_unit[:, :, self.free] = each / self.probe[self.free]
        scatter = np.std(goals, axis=0, ddof=1) / np.sqrt(_AVERAGED)
        return x, np.mean(at, axis=0), per_unit, scatter

    def step(
        self, x: Floats, r: Floats, smooth: Floats, slopes: Floats, radius: float
    ) -> tuple[Floats, Floats, float, float]:
        """The first damped step after which the cost is lower: where, residuals, length in probes, share gained."""
        scales = scales_of((smooth + r) / 2, self.kinds, len(self.free))
        cost = robust_cost(r / scales)
        square, gradient = _normal_equations(slopes / scales[:, None], smooth / scales)
        room = x[self.free] / self.probe[self.free]
        for damping in _DAMPINGS:
            by = _bounded_step(square, gradient, damping, room)
            length = float(np.abs(by).max())
            by *= min(1.0, _REACH * radius / max(length, 1e-9))
            near = self.moved(x, by)
            r_near = self.at(near)
            if (cost_near := robust_cost(r_near / scales)) < cost:
                return near, r_near, float(np.abs(by).max()), 1 - cost_near / cost
        return x, r, 0.0, 0.0


def _normal_equations(columns: Floats, scaled: Floats) -> tuple[Floats, Floats]:
    """The weighted squares of the columns, and their gradient, for residuals over their scales."""
    w = weights(scaled)
    return columns.T @ (w[:, None] * columns), columns.T @ (w * scaled)


def _two_levels(coefficients: int) -> Floats:
    """float64[runs, coefficients] of +1 and -1: columns at right angles, each row with its opposite.

    Rows of Sylvester's Hadamard matrix; curves drop out of the slopes because each run has its opposite.
    """
    signs = np.ones((1, 1))
    while len(signs) <= coefficients:
        signs = np.block([[signs, signs], [signs, -signs]])
    columns = signs[:, 1 : coefficients + 1]
    return np.vstack([columns, -columns])


def _bounded_step(square: Floats, gradient: Floats, damping: float, room: Floats) -> Floats:
    """The damped step, with coefficients that it would push below 0 held there."""
    damped = square + damping * np.diag(np.maximum(np.diag(square), 1e-12))
    open_ = np.ones(len(gradient), bool)
    step = np.zeros(len(gradient))
    for _ in range(len(gradient)):
        step = np.where(open_, 0.0, -room)
        chosen = np.ix_(open_, open_)
        pushed = gradient[open_] + damped[np.ix_(open_, ~open_)] @ step[~open_]
        step[open_] = -np.linalg.solve(damped[chosen], pushed)
        out = open_ & (step < -room)
        if not out.any():
            break
        open_ &= ~out
    return np.maximum(step, -room)


@dataclass(frozen=True)
class Confidence:
    """``low``, ``high``: float64[coefficients], bounds of 95 % by resampling windows; equal where held.

    ``correlation``: of those that are not held, as ``FitRecord`` has it.
    """

    low: Floats
    high: Floats
    correlation: tuple[tuple[float, ...], ...]


def variance_inflation(design: Floats, free: Bools) -> Floats:
    """float64[coefficients]: how much wider each is known because the others are not; inf if nothing shows it.

    1 / (1 - R squared) of its column of ``design`` (float64[rows, coefficients]) on the other free ones,
    1 for what is held.
    """
    inflation = np.ones(design.shape[1])
    for i in np.flatnonzero(free):
        others = design[:, free & (np.arange(len(free)) != i)]
        column = design[:, i]
        # Around its mean: that a column is not 0 is what an intercept shows, not what it shows itself.
        size = float(column @ column) if np.ptp(column) == 0 else float(((column - column.mean()) ** 2).sum())
        rest = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        left = float(rest @ rest)
        inflation[i] = np.inf if size == 0 or left <= 1e-12 * size else size / left
    return inflation


def confidence(
    minimum: Minimum, free: Bools, group: Int64s, stratum: Int64s, seed: int, cycles: Bools | None = None
) -> Confidence:
    """Bounds of 95 % of each free coefficient, by drawing blocks of windows with replacement.

    ``group``: int64[rows], rows that are drawn together (E2E and TTFT of a window), in order of time.  ``stratum``:
    int64[groups], load stage and part of the evidence.  Blocks are as long as neighbouring windows are correlated.
    Each draw moves the coefficients by one Gauss-Newton step from the minimum; nothing is simulated.  ``cycles``:
    bool[rows], the rows of step records: bounds are wider where these and the latencies disagree significantly.
    """
    chosen = np.flatnonzero(free)
    scaled = minimum.residuals / minimum.scales
    planes, w = minimum.slopes[:, :, chosen] / minimum.scales[:, None], weights(scaled)
    columns = planes.mean(axis=0)
    groups = len(stratum)
    influence = np.linalg.lstsq(columns.T @ (w[:, None] * columns), (columns * (w * scaled)[:, None]).T, rcond=None)[0]
    blocks = row_blocks(stratum, [np.asarray(np.bincount(group, row, groups), np.float64) for row in influence])
    draws, chance = np.empty((RESAMPLES, len(chosen))), _chance(planes, w)
    for i, drawn in enumerate(resampled(blocks, RESAMPLES, seed)):
        times = np.bincount(drawn, minlength=groups)[group] * w
        square = _without(columns.T @ (times[:, None] * columns), chance)
        draws[i] = minimum.vector[chosen] - np.linalg.lstsq(square, columns.T @ (times * scaled), rcond=None)[0]
    draws = spread(draws, blocks)
    # Residuals are smaller than errors by what the coefficients took of them; the search has an error of its own.
    draws = draws.mean(axis=0) + np.sqrt(len(w) / max(len(w) - len(chosen), 1)) * (draws - draws.mean(axis=0))
    if cycles is not None:
        draws = draws.mean(axis=0) + _disagreement(columns, scaled, w, cycles) * (draws - draws.mean(axis=0))
    deviation = np.maximum(draws.std(axis=0), 1e-12)
    of_slopes = _moved_by_chance(planes, w, scaled, chance)
    wider = np.sqrt(1 + (minimum.scatter[chosen] ** 2 + of_slopes**2) / deviation**2)
    draws = draws.mean(axis=0) + wider * (draws - draws.mean(axis=0))
    low, high = minimum.vector.copy(), minimum.vector.copy()
    for place, i in enumerate(chosen.tolist()):
        # The search ends a little beside where the linear step would take it; the spread is what counts.
        off = minimum.vector[i] - float(draws[:, place].mean())
        bounds = [bound + off for bound in interval(draws[:, place])]
        # What searches from elsewhere found as good is as good an answer.
        low[i] = max(min(bounds[0], float(minimum.ends[:, i].min())), 0.0)
        high[i] = max(bounds[1], float(minimum.ends[:, i].max()), 0.0)
    return Confidence(low, high, correlation_of(draws))


def correlation_of(draws: Floats) -> tuple[tuple[float, ...], ...]:
    """Of the columns of draws, as ``FitRecord`` has it, in thousandths; 0 with a column that does not change."""
    off = draws - draws.mean(axis=0)
    size = np.maximum(np.sqrt((off**2).sum(axis=0)), 1e-300)
    matrix = (off.T @ off) / size / size[:, None]
    return tuple(tuple(np.round(row[: i + 1], 3).tolist()) for i, row in enumerate(matrix[1:]))


def _chance(planes: Floats, w: Floats) -> Floats:
    """float64[coefficients, coefficients]: the variance that chance in the mean slopes adds to their weighted squares.

    Where two costs trade off, that chance alone would seem to identify them.
    """
    count = len(planes)
    if count < 2:
        return np.zeros((planes.shape[2], planes.shape[2]))
    off = planes - planes.mean(axis=0)
    return np.asarray(np.einsum("pri,r,prj->ij", off, w, off) / (count * (count - 1)), np.float64)


def _moved_by_chance(planes: Floats, w: Floats, scaled: Floats, chance: Floats) -> Floats:
    """float64[coefficients]: standard error of the minimum by the chance in the mean slopes."""
    count, columns = len(planes), planes.mean(axis=0)
    if count < 2:
        return np.zeros(planes.shape[2])
    square = _without(columns.T @ (w[:, None] * columns), chance)
    steps = np.linalg.lstsq(square, np.einsum("pri,r->ip", planes, w * scaled), rcond=None)[0]
    return np.asarray(steps.std(axis=1, ddof=1) / np.sqrt(count), np.float64)


def _without(square: Floats, chance: Floats) -> Floats:
    """A matrix of squares less the part of chance, at least ``_LEAST_KNOWN`` of it in each direction."""
    if not chance.any():
        return square
    from scipy.linalg import eigh  # heavy, and only fits need it

    share, directions = eigh(square - chance, square + 1e-12 * np.diag(np.diag(square)))
    back = square @ directions
    return np.asarray(back @ np.diag(np.maximum(share, _LEAST_KNOWN)) @ back.T, np.float64)


def _disagreement(columns: Floats, scaled: Floats, w: Floats, one: Bools) -> Floats:
    """float64[coefficients]: Birge's ratio (1932) of two kinds of rows, at least 1.

    By it intervals of measurements that disagree are widened: their difference over its standard error.
    """
    coefficients = columns.shape[1]
    steps, variances = np.zeros((2, coefficients)), np.full((2, coefficients), np.inf)
    for kind, rows in enumerate((one, ~one)):
        # Cycles say nothing of a delay before the queue.
        seen = np.flatnonzero(np.abs(columns[rows]).sum(axis=0))
        part, weight, degrees = columns[rows][:, seen], w[rows], int(rows.sum()) - len(seen)
        square = part.T @ (weight[:, None] * part)
        if degrees < 1 or not len(seen) or np.linalg.cond(square) > _SINGULAR:
            continue
        variance = float((weight * scaled[rows] ** 2).sum()) / degrees
        steps[kind, seen] = np.linalg.solve(square, part.T @ (weight * scaled[rows]))
        variances[kind, seen] = np.diag(np.linalg.inv(square)) * variance
    unsure = np.sqrt(np.maximum(variances.sum(axis=0), 1e-300))
    return np.asarray(np.maximum(np.abs(steps[0] - steps[1]) / unsure, 1.0), np.float64)
