"""Coefficient releases: what ships, what is read, what is refused and how it is said."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.document import TimeNs
from blis_replay.base.errors import ReleaseError
from blis_replay.blis.kernel.step_time import KernelModel
from blis_replay.blis.latency.models import LatencyModel, PrefillBeyond
from blis_replay.blis.releases import latency
from blis_replay.blis.releases.fit import CoefficientFit, PartScore
from blis_replay.blis.releases.release import bundled_releases, format_release, parse_release

SOUND = """
schema: blis-replay/coefficients/1
name: sound
status: valid
summary: A line.
source: a test
hardware: H100
models:
  - model: some/Model
    tensor_parallelism: 2
    latency:
      kind: blackbox
      intercept: 13.546 ms
      per_prefill_token: 30.5 us/token
      per_decode_token: 40300 ns/token
      rounding: round_half_up
    lifecycle:
      pre_queue: 9.3 ms
      pre_queue_source: published
"""


FIT = """
    fit:
      form: line
      fitted_until: 0.6
      chosen_until: 0.8
      scheduling: asynchronous
      scheduling_told: not told apart
      scheduling_evidence: too few requests
      coefficients:
      - {name: intercept, value_us: 13546.0, low_us: 13500.5, high_us: 13600.0, status: fitted, remark: to cycles}
      scores:
      - {experiment: a, part: test, from: 0.8, until: 1.0, requests: 12, errors: {e2e: -0.01, ttft: 0.2}}
"""


def test_units_become_nanoseconds() -> None:
    """13.546 ms = 13,546,000 ns; 30.5 us and 40,300 ns a token; the delay stays in us."""
    entry = parse_release(SOUND, "test").models[0]
    assert (entry.latency.intercept_ns, entry.latency.per_prefill_token_ns) == (13_546_000, 30_500)
    assert (entry.latency.per_decode_token_ns, entry.lifecycle.pre_queue_us) == (40_300, 9_300)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("13.546 ms", "13.546 minutes", "field models[0].latency.intercept: has the unknown unit 'minutes'"),
        ("13.546 ms", "13.546 us/token", "has the unknown unit 'us/token'"),
        ("      per_decode_token: 40300 ns/token\n", "", "field models[0].latency.per_decode_token: is missing"),
        ("kind: blackbox", "kind: magic", "field models[0].latency.kind: is 'magic'; write one of blackbox, floor"),
        ("rounding: round_half_up", "rounding: up", "rounding: is 'up'; write one of round_half_up, truncate"),
        ("tensor_parallelism: 2", "tensor_parallelism: two", "field models[0].tensor_parallelism"),
        ("pre_queue:", "prequeue:", "field models[0].lifecycle.prequeue: is not a field of a release"),
        ("coefficients/1", "coefficients/2", "field schema"),
        ("intercept: 13.546 ms", "intercept: -13.546 ms", "give some/Model a negative step time"),
        # Of the record of a fit.
        ("status: fitted", "status: guessed", "fit.coefficients[0].status: is 'guessed'; write one of fitted"),
        ("part: test", "part: rest", "models[0].fit.scores[0].part: is 'rest'; write one of choose, fit, test"),
        ("      form: line\n", "      form: line\n      shape: round\n", "fit.shape: is not a field of a release"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, complaint: str) -> None:
    text = SOUND.rstrip() + FIT
    assert old in text
    with pytest.raises(ReleaseError) as refused:
        parse_release(text.replace(old, new), "mine.yaml")
    assert str(refused.value).startswith("mine.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@dataclass(frozen=True)
class Constant:
    """A kind of step time that is plugged in."""

    step_ns: TimeNs

    def for_kernel(self) -> KernelModel:
        return LatencyModel("blackbox", self.step_ns, 0, 0).for_kernel()


def test_a_kind_that_is_plugged_in_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"constant": Constant}
    monkeypatch.setattr(latency, "addons", lambda socket: kinds if socket == "latency" else {})
    monkeypatch.setattr(latency, "addon", lambda socket, name: latency.addons(socket).get(name))
    a, b = SOUND.index("      kind: blackbox"), SOUND.index("    lifecycle")
    text = f"{SOUND[:a]}      kind: constant\n      step: 3 ms\n{SOUND[b:]}"
    release = parse_release(text, "x")
    assert release.models[0].latency == Constant(3_000_000)
    assert "kind: constant\n    step: 3000 us" in format_release(release)
    with pytest.raises(
        ReleaseError, match=r"models\[0\]\.latency\.steps: is not a field of a release; did you mean step"
    ):
        parse_release(text.replace("step: 3", "steps: 3"), "x")


def test_a_kind_of_labs_that_are_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "LAB_KINDS", ("constant",))
    monkeypatch.setattr(latency, "addons", lambda socket: {})
    monkeypatch.setattr(latency, "addon", lambda socket, name: None)
    with pytest.raises(ReleaseError, match=r"^x, field .*kind: is 'constant', which needs the labs; install them with"):
        parse_release(SOUND.replace("kind: blackbox", "kind: constant"), "x")


def test_how_coefficients_came_about_is_read_and_written() -> None:
    release = parse_release(SOUND.rstrip() + FIT, "x")
    fit = release.models[0].fit
    assert fit is not None
    assert (fit.form, fit.fitted_until, fit.chosen_until) == ("line", 0.6, 0.8)
    assert (fit.scheduling, fit.scheduling_told) == ("asynchronous", "not told apart")
    assert fit.coefficients == (CoefficientFit("intercept", 13546.0, 13500.5, 13600.0, "fitted", "to cycles"),)
    assert fit.scores == (PartScore("a", "test", 0.8, 1.0, 12, {"e2e": -0.01, "ttft": 0.2}),)
    assert parse_release(format_release(release), "x").models == release.models
    assert parse_release(SOUND, "x").models[0].fit is None


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", "a: b: c", "{" * 5000, "!!python/object:os.system {}", "\x00", "models: 3"])
def test_what_is_no_release_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ReleaseError, match=r"mine\.yaml") as refused:
        parse_release(text, "mine.yaml")
    assert "\n" not in str(refused.value)


@given(st.text())
def test_no_text_crashes_the_parser(text: str) -> None:
    with pytest.raises(ReleaseError):
        parse_release(text, "mine.yaml")


@pytest.mark.parametrize("name", sorted(bundled_releases()))
def test_a_release_survives_being_written(name: str) -> None:
    release = parse_release(bundled_releases()[name], name)
    again = parse_release(format_release(release), name)
    assert replace(again, sha256="") == replace(release, sha256="")
    assert [entry.sources for entry in again.models] == [entry.sources for entry in release.models]


@pytest.mark.parametrize(
    ("alias", "floor_us"),
    [("7b-general", 3897), ("34b-general", 6673), ("70b-general", 8029), ("70b-hf-codegen", 8203), ("mixtral-x", 9125)],
)
def test_the_published_overhead_floors(alias: str, floor_us: int) -> None:
    """Step-model studies, round 3: one floor a model, and one of its own for the second 70B server."""
    release = parse_release(bundled_releases()["stepml-overhead-floor"], "stepml-overhead-floor")
    models = {"7b": "meta-llama/Llama-2-7b-hf", "34b": "codellama/CodeLlama-34b-Instruct-hf"}
    models |= {"70b": "meta-llama/Llama-2-70b-hf", "mixtral": "mistralai/Mixtral-8x7B-v0.1"}
    entry = release.entry_for(models[alias.split("-")[0]], None, alias)
    assert entry.latency.floor_ns == floor_us * 1000


def test_the_negative_line_is_listed_but_not_used() -> None:
    """-5525 + 215.1 * decodes turns positive at 26 decodes; its published errors are quoted."""
    release = parse_release(bundled_releases()["stepml-per-model-linear"], "x")
    assert release.published_errors == {"e2e_percent": 115.0, "ttft_percent": 102.9, "itl_percent": 134.6}
    with pytest.raises(ReleaseError, match="CodeLlama-34b-Instruct-hf: step time is negative below a batch of 26"):
        release.refuse_if_invalid()


def test_an_unknown_model_is_refused_with_what_there_is() -> None:
    release = parse_release(SOUND, "x")
    with pytest.raises(ReleaseError, match=r"no coefficients for other/Model .*it has some/Model tp 2.*calibrate"):
        release.entry_for("other/Model", 2, "other-general")
    with pytest.raises(ReleaseError, match="for some/Model tp 4 "):
        release.entry_for("some/Model", 4, "x")


def test_a_release_may_name_its_data_type_and_is_then_refused_on_another() -> None:
    """A recording that does not know its own fits any, as with tensor parallelism."""
    release = parse_release(SOUND.replace("    latency:", "    dtype: bfloat16\n    latency:"), "x")
    assert release.models[0].dtype == "bfloat16"
    assert parse_release(format_release(release), "x").models == release.models
    assert release.entry_for("some/Model", 2, "x", "bfloat16") == release.entry_for("some/Model", 2, "x", None)
    with pytest.raises(ReleaseError, match=r"Model tp 2 fp8 \(it has some/Model tp 2 bfloat16"):
        release.entry_for("some/Model", 2, "x", "fp8")
    assert parse_release(SOUND, "x").entry_for("some/Model", 2, "x", "fp8").dtype is None
    with pytest.raises(ReleaseError, match=r"models\[0\]\.dtype: is 16; write text"):
        parse_release(SOUND.replace("    latency:", "    dtype: 16\n    latency:"), "x")


def test_what_a_release_was_fitted_on_is_remembered() -> None:
    kinds = {"a": "steps", "b": "latencies"}
    rows = ", ".join(f"{{experiment: {slug}, content_hash: h, data: {data}}}" for slug, data in kinds.items())
    release = parse_release(f"{SOUND}fitted_on: [{rows}]", "x")
    assert [release.used(slug) for slug in ("a", "b", "c")] == ["steps", "latencies", None]


def test_releases_are_safe_yaml() -> None:
    for text in bundled_releases().values():
        assert isinstance(yaml.safe_load(text), dict)


def test_an_error_names_the_release_that_ships_with_the_coefficients() -> None:
    """``tiny`` is the model of the recordings of a real server without a GPU; of no model called so there are none."""
    shipped = parse_release(bundled_releases()["h100-vllm-0.15.1"], "h100-vllm-0.15.1")
    with pytest.raises(ReleaseError, match=r"; take the release cpu-vllm-0.32.0, or fit some with"):
        shipped.entry_for("tiny", 1, "mine", "bfloat16")
    with pytest.raises(ReleaseError, match=r"\); fit some with"):
        shipped.entry_for("tiny2", 1, "mine", "bfloat16")


def test_prefills_beyond_those_fitted_cost_what_the_datasheet_says() -> None:
    """60 % of the H100's peak is 22.7 us a token for Llama-2-7B (fitted: 16.498), 56.9 for CodeLlama-34B (41.399).

    Fitted on batches of up to 1,103 and 1,087 prefill tokens.  The fits of 70B and Mixtral have more already: no bend.
    """
    release = parse_release(bundled_releases()["h100-vllm-0.15.1"], "h100-vllm-0.15.1")
    bends = {entry.model.split("/")[1]: entry.latency.prefill_beyond for entry in release.models}  # type: ignore[union-attr]
    assert bends == {
        "CodeLlama-34b-Instruct-hf": PrefillBeyond(1_087, 15_501),
        "Llama-2-70b-hf": PrefillBeyond(),
        "Llama-2-7b-hf": PrefillBeyond(1_103, 6_202),
        "Mixtral-8x7B-v0.1": PrefillBeyond(),
    }
    assert parse_release(format_release(release), "again").models == release.models


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("experts_per_token: 2", "experts_per_token: 9", "experts_per_token: is more than there are experts"),
        ("compile: 900000 us", "compile: -5 us", "compile: is -5 us"),
        ("experts: 8", "experts: 0", "experts: is 0"),
    ],
)
def test_kernels_that_cannot_be_are_refused(before: str, after: str, said: str) -> None:
    """Two of Mixtral's eight experts serve a token, and a kernel takes 0.9 s to compile."""
    text = bundled_releases()["h100-vllm-0.15.1"]
    assert before in text
    with pytest.raises(ReleaseError, match=rf"models\[3\]\.first_use\.{said}"):
        parse_release(text.replace(before, after), "mine.yaml")
