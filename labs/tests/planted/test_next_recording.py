"""The load that a fit asks for next, recorded on the synthetic server that was fitted, does what it promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import EngineConfig
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.fit import next_recording as next_recording_module
from blis_replay.validate.fit.calibrate import Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.fit.next_recording import SPREAD, Load, loads_for, next_recording
from blis_replay_labs.planted.servers import Server, any_server, residence_us, run_of

# Requests of the second recording; the load that is asked for has more.
_MOST_REQUESTS = 4_000
# True errors of mean E2E: what the first load must leave for this to test anything, and what the second may.
_OFF, _RIGHT = 0.03, 0.01


def _under(server: Server, load: Load) -> Server:
    """The server under another load, with the depth at which it serves that rate."""
    other = replace(
        server,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        requests=min(load.requests, _MOST_REQUESTS),
    )
    depth = 1.0
    for _ in range(30):  # Little's law; a deeper server is slower
        depth = load.requests_per_s * residence_us(replace(other, depth=depth)) / 1e6
    return replace(other, depth=depth)


def _e2e_error(entry: ModelEntry, server: Server) -> float:
    """Of the mean E2E that a fit gives another draw of the server's load, without noise."""
    truth = run_of(replace(server, noise="none"), draw=5)
    plan = plan_replay(truth, ReplayMode(scheduling="asynchronous" if server.asynchronous else "synchronous"))
    result = simulate(plan.trace, plan.engine, entry.latency, entry.lifecycle)
    return float(result.e2e_us.mean() / truth.requests["e2e_us"].to_numpy().mean() - 1)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1, 7])
def test_the_load_asked_for_makes_the_least_certain_prediction_certain(seed: int) -> None:
    """Servers with noisy steps, fitted on 600 requests of their usual load; what is true is known."""
    server = any_server(seed, (), 600, "steps", "line")
    first = run_of(server)
    (fit,) = calibrate([first], "first", Options(load_release(DEFAULT_PRIOR)))[1]
    asked = fit.next
    assert asked is not None
    assert (asked.then < asked.now, asked.load.engine) == (True, {})
    least_certain = _under(server, asked.least_certain)
    recorded = run_of(_under(server, asked.load), draw=3)
    second = replace(recorded, slug=f"{recorded.slug}-b", engine=first.engine)
    (both,) = calibrate([first, second], "both", Options(load_release(DEFAULT_PRIOR)))[1]
    before, after = (abs(_e2e_error(one.entry, least_certain)) for one in (fit, both))
    assert (before > _OFF, after < _RIGHT) == (True, True), (before, after)


def test_the_command_sends_the_load_as_it_was_weighed_up() -> None:
    """Of `vllm bench serve`: lengths of its random data set lie within the ratio around the mean."""
    words = " ".join(Load(2.5, 512, 64, 750, {}).command).split()
    given = dict(pairwise(words))
    named = ("--random-input-len", "--random-output-len", "--random-range-ratio", "--num-prompts", "--request-rate")
    assert [float(given[name]) for name in named] == [512, 64, SPREAD, 750, 2.5]


def test_coefficients_that_no_recording_determined_ask_for_nothing() -> None:
    """The data sheet's, in which nothing is fitted."""
    entry = load_release(DEFAULT_PRIOR).models[0]
    assert next_recording(entry, [run_of(any_server(1))]) is None


@pytest.mark.parametrize("times", [1, 3])
def test_the_load_asked_for_is_one_that_the_server_keeps_up_with(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of 512 tokens costs by what they attend to alone: 3,000 us * 512 * 513 / 2 / 1,000 = 394 ms.

    So it can serve some 2.5 such requests a second.  Three times a rate that was worked out is too much of most loads.
    """
    rate = next_recording_module._rate
    monkeypatch.setattr(next_recording_module, "_rate", lambda *of: times * rate(*of))
    config = EngineConfig(128, 2_048, 8_192, async_scheduling=True, num_gpu_blocks=20_000)
    latency = LatencyModel("blackbox", 5_000_000, 0, 2_000_000, 0, per_1000_attended_ns=3_000_000)
    loads = [load for load, _steps in loads_for(config, latency) if load.prompt_tokens == 512]
    assert loads
    assert all(load.requests_per_s < 1e6 / 394_000 for load in loads)
