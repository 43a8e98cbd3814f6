"""Gate policies: the documented defaults, what is read, what is refused and how it is said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.errors import PolicyError
from blis_replay.validate.gating.policy import Coverage, Policy, Ranking, Regression, load_policy, parse_policy

HEAD = "schema: blis-replay/gate-policy/1\n"
DOCS = Path(__file__).parents[2] / "docs" / "release-in-ci.md"


def test_every_field_may_be_left_out_and_the_defaults_are_those_of_the_documents() -> None:
    """Design, section 7: mean errors of E2E within 10 %, TTFT 15 %, ITL 15 %."""
    documented = re.findall(r"```yaml\n(schema: .*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert len(documented) == 1
    for text in (HEAD, documented[0]):
        stated = parse_policy(text, "default.yaml")
        assert stated.limits == {("e2e", "mean"): 0.10, ("ttft", "mean"): 0.15, ("itl", "mean"): 0.15}
        assert replace(stated, sha256="", thresholds=None) == Policy()
    assert load_policy(None) == Policy()


def test_a_policy_says_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "strict.yaml"
    path.write_text(
        HEAD + "name: strict\nthresholds: {e2e: {mean: 1 %, p99: 5%}, tpot: {p50: 2.5 %}}\n"
        "regression: {cells: [ttft p99], margin: 0 %, confidence: 99 %}\nranking: {metrics: [], tolerance: 1 %}\n"
        "coverage: {experiments: 4, models: [a/B]}\nheld_out_only: true\n"
    )
    policy = load_policy(path)
    assert policy.thresholds == {("e2e", "mean"): 0.01, ("e2e", "p99"): 0.05, ("tpot", "p50"): 0.025}
    assert policy.regression == Regression(("ttft p99",), 0.0, 0.99)
    assert (policy.ranking, policy.coverage) == (Ranking((), 0.01), Coverage(4, ("a/B",)))
    assert (policy.name, policy.held_out_only, len(policy.sha256)) == ("strict", True, 64)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "schema: is missing"),
        (
            "schema: blis-replay/gate-policy/2",
            "is 'blis-replay/gate-policy/2'; write blis-replay/gate-policy/1",
        ),
        (HEAD + "treshold: {}", "treshold: is not a field of a gate policy; did you mean thresholds?"),
        (
            HEAD + "thresholds: {e2e: {mean: 10}}",
            "thresholds.e2e.mean: is 10, and not a number with a unit; write e.g.",
        ),
        (HEAD + "thresholds: {e2e: {mean: 0.1}}", "is 0.1, and not a number with a unit"),
        (HEAD + "thresholds: {e2e: {mean: -1 %}}", "mean: is -1 %; write a number with a unit above 0 %"),
        (
            HEAD + "thresholds: {e2e: {median: 10 %}}",
            "e2e.median: is not a field of a gate policy; did you mean mean?",
        ),
        (
            HEAD + "thresholds: {latency: {mean: 10 %}}",
            "latency: is not a field of a gate policy; remove it, or use one of e2e",
        ),
        (HEAD + "thresholds: {e2e: 10 %}", "field thresholds.e2e: is '10 %'; write key: value pairs"),
        (HEAD + "regression: {cells: [e2e]}", "field regression.cells: names 'e2e'; write e.g. e2e mean"),
        (HEAD + "regression: {cells: [itl p99]}", "which cannot be resampled"),
        (HEAD + "regression: {confidence: 100 %}", "is 100 %; write a number with a unit from 50 % to below 100 %"),
        (HEAD + "thresholds: {e2e: {mean: 0 %}}", "is 0 %; write a number with a unit above 0 %"),
        (HEAD + "regression: {marign: 1 %}", "field regression.marign: is not a field of a gate policy"),
        (HEAD + "ranking: {metrics: [p99]}", "field ranking.metrics[0]: is 'p99'; write one of e2e"),
        (HEAD + "ranking: {metrics: e2e}", "is 'e2e'; write a list, each one of e2e"),
        (
            HEAD + "coverage: {experiments: 0}",
            "experiments: is 0; write a whole number from 1 to 1,000,000",
        ),
        (HEAD + "coverage: {experiments: true}", "is true; write a whole number from 1 to 1,000,000"),
        (HEAD + "coverage: {models: [3]}", "field coverage.models[0]: is 3; write text"),
        (HEAD + "held_out_only: sometimes", "is 'sometimes'; write true or false"),
        (HEAD + "a: !!python/object:os.system {}", "not YAML"),
        (HEAD + "name: a\nname: b", "line 3: not YAML (the key 'name' stands there twice)"),
        (HEAD + "name: &a b\ncoverage: {models: [*a]}", "line 3: not YAML (aliases (*name) are not read)"),
        (HEAD + "<<: {name: a}", "line 2: not YAML (merge keys (<<) are not read)"),
        (HEAD + "a: " + "[" * 100_000, "line 2: not YAML (it is nested too deeply)"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse_policy(text or "{}", "mine.yaml")
    assert str(refused.value).startswith("mine.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text())
def test_no_text_crashes_the_parser(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_policy(text, "mine.yaml")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 2_000_000])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=r"p\.yaml"):
        load_policy(path)
