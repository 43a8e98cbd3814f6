"""The table of `make live`: recordings of a real server beside their replays, with the bars that must hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from blis_replay.validate import api as br

TRAINED = ("tiny-live-a", "tiny-live-c")
AGAIN, FEWER, PLAIN = "tiny-live-a2", "tiny-live-e", "tiny-live-plain"
# Largest error of the mean: E2E, TTFT, ITL, and of the number of preemptions.
BARS: dict[str, tuple[float, float, float, float | None]] = {
    "tiny-live-a2": (0.05, 0.10, 0.05, None),
    "tiny-live-b": (0.05, 0.10, 0.05, None),
    "tiny-live-d": (0.10, 0.10, 0.10, 0.20),
}
EFFECT_POINTS = 10.0
COST_US, COST_SHARE = 50.0, 0.01
METRICS = ("E2E", "TTFT", "ITL")


@dataclass(frozen=True)
class Means:
    """Mean E2E, TTFT and ITL in ms, and preemptions, of one side; the pace of its steps where the recording gave it."""

    e2e_ms: float
    ttft_ms: float
    itl_ms: float
    preemptions: int
    pace: float = 1.0

    def over(self, other: Means) -> tuple[float, float, float]:
        """How much larger than the other's, as fractions."""
        mine, others = ((m.e2e_ms, m.ttft_ms, m.itl_ms) for m in (self, other))
        a, b, c = (x / y - 1 for x, y in zip(mine, others, strict=True))
        return a, b, c


def observed(name: str, store: Path) -> Means:
    """What the client measured, and the server's preemptions."""
    recording = br.load(name, store)
    requests = recording.requests.where("status = 'ok'").frame()
    preemptions = recording.lifecycles.aggregate(count="coalesce(sum(preemptions), 0)")["count"]
    return _means(requests["e2e_us"].sum(), requests["ttft_us"].sum(), requests, int(preemptions))


def simulated(name: str, release: Path, store: Path, mode: str = "exact") -> Means:
    """What a replay with a release makes of the same requests."""
    run = br.replay(name, str(release), mode, store=store)
    ok = (run.recording.requests["status"] == "ok").to_numpy() & run.simulated.completed
    requests = run.recording.requests.where("status = 'ok'").frame()
    preemptions, pace = run.simulated.engine.preemptions.sum(), run.plan.pace or 1.0
    return _means(run.e2e_us[ok].sum(), run.ttft_us[ok].sum(), requests, int(preemptions), pace)


def _means(e2e_us: float, ttft_us: float, requests: pl.DataFrame, preemptions: int, pace: float = 1.0) -> Means:
    gaps, count = int((requests["output_tokens"] - 1).sum()), len(requests)
    return Means(e2e_us / count / 1e3, ttft_us / count / 1e3, (e2e_us - ttft_us) / gaps / 1e3, preemptions, pace)


def print_table(recordings: Path, store: Path) -> int:
    """Ingest the recordings, calibrate, replay, and print.

    1 if a bar is missed; 3 if a recording is missing, or if only bars are missed below which two equal runs of this
    machine differ as well.
    """
    names = [*TRAINED, *BARS, FEWER]
    missing = [name for name in names if not (recordings / name).is_dir()]
    if missing:
        print(f"no recordings of {', '.join(missing)} in {recordings}: run `make live`, or scripts/live.py --only NAME")
        return 3
    # What is in the store may be of an earlier round: another run, with a few steps more or fewer.
    br.ingest(*(recordings / name for name in names), store=store, replace=True)
    both, alone = (_calibrated(store, *trained) for trained in (TRAINED, TRAINED[:1]))
    missed, undecided = _replays(names, both, alone, store)
    floor = 100 * observed(AGAIN, store).over(observed(TRAINED[0], store))[0]
    (missed if abs(floor) <= EFFECT_POINTS else undecided).extend(_effect(both, store))
    missed += _cost(recordings, store)
    for line in missed:
        print(f"missed: {line}")
    for line in undecided:
        print(f"not decided, as equal runs differ by more than the bar: {line}")
    if not missed and not undecided:
        print("every bar holds")
    return 1 if missed else 3 if undecided else 0


def _calibrated(store: Path, *names: str) -> Path:
    """A release that is fitted to all of these recordings."""
    out = store.with_name(f"from-{'-and-'.join(name.removeprefix('tiny-live-') for name in names)}.yaml")
    train = [part for name in names for part in ("--train", name)]
    command = [sys.executable, "-m", "blis_replay.validate.cli.main", "calibrate", *train, "--split", "1:1", "--force"]
    subprocess.run([*command, "--out", str(out), "--store", str(store)], check=True, stdout=subprocess.DEVNULL)
    return out


def _replays(names: list[str], both: Path, alone: Path, store: Path) -> tuple[list[str], list[str]]:
    """Print each recording beside its replays; which bars are missed, and which of those say nothing here."""
    seen = {name: observed(name, store) for name in names}
    floor = seen[AGAIN].over(seen[TRAINED[0]])
    missed: list[str] = []
    undecided: list[str] = []
    head = f"{'mean of the recording, ms':>38}"
    for errors in ("error, fitted to a and c", "at the pace of the run", "fitted to a alone", "recorded step times"):
        head += f"{errors:>29}"
    print(f"{'':12}{head}")
    print(
        f"{'':12}"
        + f"{'E2E':>12}{'TTFT':>9}{'ITL':>8}{'preempt.':>9}"
        + (f"{'E2E':>12}{'TTFT':>9}{'ITL':>8}" * 4)
        + f"{'pace':>7}"
    )
    for name in names:
        recorded, replayed = seen[name], simulated(name, both, store)
        errors, others = replayed.over(recorded), simulated(name, alone, store).over(recorded)
        paced = simulated(name, both, store, "pace=recorded")
        forced = simulated(name, both, store, "step_time=recorded").over(recorded)
        counts = f"{recorded.preemptions}/{replayed.preemptions}"
        cells = f"{recorded.e2e_ms:12,.1f}{recorded.ttft_ms:9,.1f}{recorded.itl_ms:8.2f}{counts:>9}"
        label = name.removeprefix("tiny-live-") + (" (fit)" if name in TRAINED else "")
        compared = (errors, paced.over(recorded), others, forced)
        print(f"{label:12}{cells}{''.join(map(_percent, compared))}{paced.pace:7.2f}")
        for line, decided in _missed(name, errors, floor, recorded.preemptions, replayed.preemptions):
            (missed if decided else undecided).append(line)
    print(f"{'noise floor':12}{'a again against a':>38}{_percent(floor)}")
    print("preempt.: preemptions, recorded/replayed; pace: time of the steps over that by the fit to a and c")
    return missed, undecided


def _missed(
    name: str, errors: tuple[float, float, float], floor: tuple[float, float, float], recorded: int, replayed: int
) -> list[tuple[str, bool]]:
    """Each bar that a replay misses, and whether two equal runs are alike enough to say so."""
    if name not in BARS:
        return []
    *bars, preemptions = BARS[name]
    missed = [
        (f"{name}: {metric} {100 * error:+.1f} %, bar {100 * bar:.0f} %", abs(real) <= bar)
        for metric, error, real, bar in zip(METRICS, errors, floor, bars, strict=True)
        if bar is not None and not abs(error) <= bar
    ]
    if preemptions is not None and not abs(replayed - recorded) <= preemptions * recorded:
        line = f"{name}: {replayed} preemptions for {recorded}, bar {100 * preemptions:.0f} %"
        missed.append((line, abs(floor[0]) <= bars[0]))
    return missed


def _effect(release: Path, store: Path) -> list[str]:
    """The effect of fewer sequences on E2E: as `simulate` has it from the recording with more, and as it was."""
    rows = br.simulate(TRAINED[0], {"max_num_seqs": 4}, str(release), store).frame
    recorded, changed = rows["e2e_mean_ms"].to_list()[:2]
    predicted = 100 * (changed / recorded - 1)
    effect = 100 * observed(FEWER, store).over(observed(TRAINED[0], store))[0]
    print(f"max_num_seqs 4 instead of 32: E2E {effect:+.1f} %, predicted {predicted:+.1f} % from the recording with 32")
    if abs(predicted - effect) <= EFFECT_POINTS:
        return []
    return [
        f"effect of max_num_seqs: {predicted:+.1f} % predicted, {effect:+.1f} % seen, bar {EFFECT_POINTS:.0f} points"
    ]


def _cost(recordings: Path, store: Path) -> list[str]:
    """What recording costs: in the engine's way, and the client's own measure without the recorder."""
    findings = br.inspect(TRAINED[0], store).document["findings"]
    measured = next(finding["measured"] for finding in findings if finding["check"] == "recorder")
    steps = br.load(TRAINED[0], store).steps.aggregate(us="(max(start_us) - min(start_us)) / count(*)")
    cost_us, share = measured["wrapper_us_per_step"], measured["wrapper_us_per_step"] / steps["us"]
    print(f"the recorder costs the engine {cost_us:.1f} us per step, {100 * share:.2f} % of the mean step cycle")
    if (recordings / PLAIN).is_dir():
        br.ingest(recordings / PLAIN, store=store)
        with_it, without = observed(TRAINED[0], store), observed(PLAIN, store)
        again = observed(AGAIN, store)
        print(
            f"without it E2E {without.e2e_ms:.1f}, TTFT {without.ttft_ms:.1f}, ITL {without.itl_ms:.2f} ms; with it "
            f"{with_it.e2e_ms:.1f}, {with_it.ttft_ms:.1f}, {with_it.itl_ms:.2f} and again "
            f"{again.e2e_ms:.1f}, {again.ttft_ms:.1f}, {again.itl_ms:.2f}"
        )
    missed = cost_us > COST_US or share > COST_SHARE
    return [f"cost of recording: {cost_us:.1f} us per step ({100 * share:.2f} %), bars 50 us and 1 %"] if missed else []


def _percent(errors: tuple[float, float, float]) -> str:
    widths = (12, 9, 8)
    return "".join(f"{f'{100 * error:+.1f} %':>{width}}" for error, width in zip(errors, widths, strict=True))
