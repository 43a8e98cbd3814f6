"""The simulators that a user can choose, and their answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blis_replay.blis.release import CoefficientRelease
from blis_replay.replay.blis_binary import DEFAULT_TIMEOUT_S, BlisBinary, find_build, own_release
from blis_replay.replay.blis_differences import restarted_outputs_elsewhere
from blis_replay.replay.errors import UnknownNameError
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.comparison.comparison_text import comparison_text, observed_text, verdict_line
from blis_replay.validate.comparison.error_columns import error_cell
from blis_replay.validate.metrics import METRICS
from blis_replay.validate.terminal import milliseconds, table, wrap


def chosen_simulators(
    choice: str, release: CoefficientRelease, binary: str, timeout_s: float, own_model: bool
) -> tuple[Simulator, ...]:
    """The simulators of ``embedded``, ``blis`` or ``both``, in the order in which they are shown.

    ``binary`` is looked at only where it is needed.  ``own_model``: BLIS runs the latency
    model of its build in place of the release.  Raises ``BlisError`` if there is no such
    binary, or it is no BLIS.
    """
    if choice == "embedded":
        return (EmbeddedEngine(release),)
    build = find_build(binary)
    blis = BlisBinary(build, own_release(build) if own_model else release, own_model, timeout_s)
    return (blis,) if choice == "blis" else (EmbeddedEngine(release), blis)


def simulator_named(name: str, coefficients: str | None, default: str, binary: str | None) -> Simulator:
    """``embedded`` or ``blis`` with a release (``default`` if None; then BLIS runs its own model).

    Raises ``UnknownNameError`` for ``blis`` without a binary, and as ``chosen_simulators`` does.
    """
    if name == "blis" and binary is None:
        raise UnknownNameError("the simulator blis needs --blis-binary PATH")
    release = load_release(coefficients or default)
    (simulator,) = chosen_simulators(name, release, binary or "", DEFAULT_TIMEOUT_S, coefficients is None)
    return simulator


def informed(blis: Comparison, embedded: Comparison) -> Comparison:
    """BLIS's comparison; where its build does not count preemptions, with what the embedded engine saw.

    Both were given the same requests and as many blocks.
    """
    simulated, seen = blis.run.simulated, embedded.run.simulated.preemptions
    if simulated.preemptions is not None or not seen:
        return blis
    differences = (*simulated.differences, restarted_outputs_elsewhere(seen))
    simulated = replace(simulated, differences=differences)
    return replace(blis, run=replace(blis.run, simulated=simulated))


def side_by_side_text(embedded: Comparison, blis: Comparison) -> str:
    """The page of the embedded engine's comparison, then BLIS beside it and where it differs."""
    rows = []
    for metric in METRICS:
        for name, cell in embedded.metrics[metric].items():
            other = blis.metrics[metric][name]
            ours, theirs = milliseconds(cell.simulated_us), milliseconds(other.simulated_us)
            errors = [error_cell(side, metric, name) for side in (embedded, blis)]
            numbers = [ours, errors[0], theirs, errors[1]] if not cell.unusable else [""] * 4
            rows.append([f"{metric.upper()} {name}", observed_text(cell), *numbers])
    return "\n\n".join(
        [
            comparison_text(embedded),
            table(["side by side", "observed ms", "embedded ms", "error", "BLIS ms", "error"], rows),
            f"BLIS ran with coefficients: {blis.run.release.name}\n{verdict_line(blis)}",
            differences_text(blis),
        ]
    )


def differences_text(blis: Comparison) -> str:
    """A line for each known difference between the two engines that applies here."""
    differences: Sequence[str] = blis.run.simulated.differences
    if not differences:
        return "no known difference between the engines applies to these requests"
    return "where the engines differ:\n" + "\n".join(wrap(f"- {line}") for line in differences)
