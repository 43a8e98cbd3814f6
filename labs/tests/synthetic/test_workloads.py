"""Made-up loads: what the distributions promise, and that no client disturbs another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay_labs.synthetic.generate import generate
from blis_replay_labs.synthetic.workload import (
    ArrivalProcess,
    Client,
    Constant,
    Conversations,
    Empirical,
    Exponential,
    Fixed,
    Gamma,
    LengthDistribution,
    Lognormal,
    Normal,
    OnOff,
    Poisson,
    SharedPrefix,
    Uniform,
    Weibull,
    Workload,
    WorkloadError,
    WorkloadFile,
    arrival_times_us,
    draw_lengths,
    parse_workload,
    weibull_shape,
)

MANY = 200_000
# Of a mean of so many gaps: 5 standard errors for a CV of 1; more for more.
CLOSE = 0.012

processes = st.sampled_from([Poisson(), Constant(), Gamma(3.5), Gamma(0.5), Weibull(2.0), OnOff(0.5, 1.5)])
lengths = st.sampled_from(
    [
        Fixed(40),
        Uniform(1, 90),
        Normal(60, 30, min=4, max=100),
        Lognormal(50, 40, min=1, max=200),
        Exponential(30, min=1, max=300),
        Empirical((3, 5, 80), (1.0, 2.0, 1.0)),
    ]
)
prefixes = st.one_of(
    st.none(),
    st.builds(
        SharedPrefix,
        st.sampled_from(["system", "tools"]),
        st.integers(1, 70),
        st.integers(1, 3),
        st.sampled_from(["before", "within"]),
    ),
)
conversations = st.one_of(st.none(), st.builds(Conversations, st.integers(1, 4), st.floats(0, 2)))


clients = st.builds(Client, st.floats(0.5, 50), processes, lengths, lengths, prefixes, conversations, st.integers(0, 2))
workloads = st.builds(
    Workload,
    clients=st.dictionaries(st.sampled_from("abcde"), clients, min_size=1, max_size=3),
    requests=st.integers(1, 60),
)
SEED = 7


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def requests_of(workload: Workload, name: str) -> RequestTrace:
    load = generate(workload, SEED)
    return load.trace.part(load.client == list(workload.clients).index(name))


def sharing(trace: RequestTrace) -> list[tuple[int, ...]]:
    """Which blocks are equal, told without the numbers that stand for them: by where each was first."""
    keys = trace.block_keys
    assert keys is not None
    first: dict[int, int] = {}
    rows = [keys.keys[s : s + c].tolist() for s, c in zip(keys.start.tolist(), keys.count.tolist(), strict=True)]
    return [tuple(first.setdefault(key, len(first)) for key in row) for row in rows]


@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(), 1), (Constant(), 0), (Gamma(3.5), 3.5), (Gamma(0.5), 0.5), (Weibull(2), 2), (Weibull(0.4), 0.4)],
)
def test_gaps_have_the_mean_of_the_rate_and_their_cv(process: ArrivalProcess, cv: float) -> None:
    """40 a second: 25 ms apart.  Tolerances are those of a sample of 200,000 gaps."""
    gaps_us = np.diff(arrival_times_us(process, 40.0, MANY, generator()), prepend=0)
    assert gaps_us.mean() == pytest.approx(25_000, rel=CLOSE * max(cv, 0.01))
    assert gaps_us.std() / gaps_us.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


@pytest.mark.slow
def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov against the exponential law; p of a sound generator is seldom below 0.1 %."""
    from scipy.stats import kstest

    gaps_us = np.diff(arrival_times_us(Poisson(), 100.0, 20_000, generator()), prepend=0)
    assert kstest(gaps_us / 10_000, "expon").pvalue > 0.001


def test_weibull_shape_of_cv_one_is_the_exponential() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0, abs=1e-9)


def test_on_off_sends_nothing_while_off_and_keeps_the_rate() -> None:
    times_s = arrival_times_us(OnOff(2.0, 6.0), 10.0, MANY, generator()) / 1e6
    assert (times_s % 8.0 <= 2.0).all()
    assert len(times_s) / times_s[-1] == pytest.approx(10.0, rel=CLOSE)


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        (Fixed(512), 512, 0),
        (Uniform(1, 9), 5, (80 / 12) ** 0.5),  # ((9 - 1 + 1)**2 - 1) / 12
        (Normal(512, 50), 512, 50),
        (Lognormal(400, 300), 400, 300),
        (Exponential(256), 256, 256),
        (Empirical((10, 40), (3.0, 1.0)), 17.5, (27 / 4 * 25) ** 0.5),  # 30**2 * 3/4 * 1/4
    ],
)
def test_lengths_have_their_mean_and_deviation(distribution: LengthDistribution, mean: float, deviation: float) -> None:
    drawn = draw_lengths(distribution, MANY, generator())
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.std() == pytest.approx(deviation, rel=0.02)
    assert drawn.min() >= 1


def test_normal_lengths_are_clipped_not_redrawn() -> None:
    """Phi(-1) = 15.87 % lie beyond each bound that is a deviation away."""
    drawn = draw_lengths(Normal(100, 10, min=90, max=110), MANY, generator())
    assert (drawn.min(), drawn.max()) == (90, 110)
    # 90.5 rounds to 90 (half to even), so half a token more than the bound counts to it.
    assert (drawn == 110).mean() == pytest.approx(0.171, abs=0.004)


@pytest.mark.slow
@given(workloads, clients)
@settings(max_examples=60, deadline=None)
def test_a_new_client_changes_no_other_clients_draws(workload: Workload, new: Client) -> None:
    """A second client takes its place in the list of all requests; what the others send stays what it was."""
    larger = replace(workload, clients={"new": new, **workload.clients})
    for client in workload.clients:
        alone, beside = requests_of(workload, client), requests_of(larger, client)
        first = slice(len(beside))
        for name in ("arrival_us", "prompt_tokens", "output_tokens"):
            assert (getattr(alone, name)[first] == getattr(beside, name)).all()
        assert sharing(alone.part(first)) == sharing(beside)


@given(workloads, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_a_longer_load_begins_like_a_shorter_one(workload: Workload, requests: int) -> None:
    one, other = generate(workload, SEED), generate(replace(workload, requests=requests), SEED)
    common = min(len(one.trace), len(other.trace))
    for name in ("arrival_us", "prompt_tokens", "output_tokens", "priority"):
        assert (getattr(one.trace, name)[:common] == getattr(other.trace, name)[:common]).all()
    assert (one.client[:common] == other.client[:common]).all()


def test_a_duration_in_seconds_ends_at_its_microsecond() -> None:
    """1.000007 * 1e6 is 1000007.0000000001 as a float: what arrives at 1,000,007 us would still be within it."""
    assert Workload(clients={}, duration_s=1.000007).duration_us == 1_000_007


@given(workloads)
@settings(max_examples=40, deadline=None)
def test_a_duration_takes_what_arrives_within_it(workload: Workload) -> None:
    """Cut at an arrival of the counted load, all that comes before is there, and nothing else."""
    counted = generate(workload, SEED).trace
    end_us = int(counted.arrival_us[-1])
    timed = replace(workload, requests=None, duration_s=end_us / 1e6)
    before = int((counted.arrival_us < end_us).sum())
    if before == 0:
        with pytest.raises(WorkloadError, match="no request arrives"):
            generate(timed, SEED)
        return
    assert (generate(timed, SEED).trace.arrival_us == counted.arrival_us[:before]).all()


@given(workloads)
@settings(max_examples=30, deadline=None)
def test_the_engine_serves_what_is_made(workload: Workload) -> None:
    """Shared texts hit: an engine with caching never computes more than one without, and serves everything."""
    trace = generate(workload, SEED).trace
    engine = EngineConfig(8, 256, 20_000, async_scheduling=False)
    result = simulate(trace, engine, LatencyModel("blackbox", 1_000_000, 10_000, 5_000))
    assert result.completed.all()
    assert (result.cached_tokens < trace.prompt_tokens).all()


def test_a_shared_text_stands_before_or_within_the_prompt() -> None:
    """40 tokens of text are two full blocks of 16; before a prompt of 100 they make it 140 tokens long."""
    client = Client(1.0, Constant(), Fixed(100), Fixed(5), SharedPrefix("text", 40))
    before = generate(Workload(clients={"c": client}, requests=3), 1).trace
    assert before.prompt_tokens.tolist() == [140, 140, 140]
    assert sharing(before) == [(0, 1)] * 3
    within = replace(client, prefix=SharedPrefix("text", 40, place="within"))
    assert generate(Workload(clients={"c": within}, requests=3), 1).trace.prompt_tokens.tolist() == [100, 100, 100]
    short = replace(within, prompt_tokens=Fixed(20))
    assert sharing(generate(Workload(clients={"c": short}, requests=2), 1).trace) == [(0,), (0,)]


def test_clients_of_one_group_share_its_texts() -> None:
    one = Client(1.0, Constant(), Fixed(8), Fixed(5), SharedPrefix("text", 48))
    other = replace(one, prefix=SharedPrefix("text", 32))
    assert sharing(generate(Workload(clients={"one": one, "other": other}, requests=2), 1).trace) == [(0, 1, 2), (0, 1)]


def test_a_turn_repeats_what_was_said_before() -> None:
    """Questions of 20 and answers of 12: prompts of 20, 52, 84, of which 32 and 64 are known (blocks of 16)."""
    client = Client(0.1, Constant(), Fixed(20), Fixed(12), None, Conversations(3, 2.0))
    trace = generate(Workload(clients={"c": client}, requests=3), 1).trace
    assert trace.arrival_us.tolist() == [10_000_000, 12_000_000, 14_000_000]
    assert trace.prompt_tokens.tolist() == [20, 52, 84]
    engine = EngineConfig(8, 256, 2_000, async_scheduling=False)
    result = simulate(trace, engine, LatencyModel("blackbox", 1_000_000, 10_000, 5_000))
    # The last token of an answer is never computed, so the block that it would fill is not there: (32 - 1) // 16.
    assert result.cached_tokens.tolist() == [0, 16, 48]


GOOD = """
schema: blis-replay/workload/1
seed: 42
requests: 10
clients:
  chat:
    rate_per_s: 5
    arrivals: {process: gamma, cv: 3}
    prompt_tokens: {distribution: normal, mean: 256, deviation: 50, min: 64, max: 512}
    output_tokens: {distribution: empirical, values: [10, 20], weights: [1, 3]}
    prefix: {group: system, tokens: 256, members: 4}
    conversations: {turns: 2, gap_s: 0.5}
"""


def test_a_workload_is_read_from_yaml() -> None:
    workload = parse_workload(GOOD, "load.yaml")
    chat = Client(
        5.0,
        Gamma(3.0),
        Normal(256.0, 50.0, min=64, max=512),
        Empirical((10, 20), (1.0, 3.0)),
        SharedPrefix("system", 256, 4),
        Conversations(2, 0.5),
    )
    assert workload == WorkloadFile(schema="blis-replay/workload/1", seed=42, clients={"chat": chat}, requests=10)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("cv: 3", "cv: -3", "field clients.chat.arrivals.cv: is -3; write a number from 0.01 to 30"),
        ("gamma", "gama", "field clients.chat.arrivals.process: is 'gama'; write one of poisson, constant"),
        ("mean: 256", "men: 256", "chat.prompt_tokens.men: is not a field of a workload; did you mean mean?"),
        ("seed: 42", "seed: 42\nseeds: 1", "field seeds: is not a field of a workload"),
        ("requests: 10", "", "field requests: or duration_s, one of them"),
        ("min: 64", "min: 640", "field clients.chat.prompt_tokens.min: is above max"),
        ("weights: [1, 3]", "weights: [1]", "field clients.chat.output_tokens.weights: are 1 for 2 values"),
    ],
)
def test_a_mistake_is_named_with_its_place(old: str, new: str, place: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_workload(GOOD.replace(old, new), "load.yaml")
    assert place in str(error.value)
    assert str(error.value).startswith("load.yaml, ")


def test_too_much_is_refused() -> None:
    client = Client(1e6, Poisson(), Fixed(1), Fixed(1))
    with pytest.raises(WorkloadError, match="more than 5,000,000 requests"):
        generate(Workload(clients={"c": client}, duration_s=1_000.0), 1)
