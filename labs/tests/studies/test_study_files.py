"""Studies as files: those that ship are sound, and a mistake is named with its place."""

from __future__ import annotations

from importlib import resources

import pytest

from blis_replay.validate.errors import StudyError, UnknownStudyError
from blis_replay_labs.studies.read import load_study, merged, parse_study, study_names

SJF = resources.files("blis_replay_labs.studies").joinpath("sjf.yaml").read_text("utf-8")


@pytest.mark.parametrize("name", study_names())
def test_a_study_that_ships_says_what_it_is(name: str) -> None:
    study = load_study(name)
    assert study.title and study.hypothesis and study.source
    assert set(study.recorded) == set(study.systems)
    assert set(study.published) <= set(study.systems)
    assert {42, 123, 456} <= set(study.seeds)  # those of the published studies
    # A reason for a difference without anything to show for it would never count.
    assert bool(study.explanation) == bool(study.evidence)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("title:", "titel:", "field titel: is not a field of a study; did you mean title?"),
        ("seeds:", "color: red\nseeds:", "field color: is not a field of a study"),
        ("systems: [A, B, ", "systems: [C, B, ", "field systems: names 'C'"),
        ("measurement: cluster", "measurement: clusters", "field measurement: is 'clusters'"),
        (
            "instances: 4",
            "instances: 0",
            "configurations.fcfs.instances: is 0; write a whole number from 1 to 1,000",
        ),
        (
            "kind: least-loaded",
            "kind: least",
            "fcfs.router.kind: is 'least'; write one of round-robin, least-loaded",
        ),
        ("value: 32", "valu: 32", "configurations.fcfs.workload.clients.short.prompt_tokens.valu: is not a field"),
        ("scheduling_policy: sjf", "policy: sjf", "field configurations.sjf.engine.policy: is not a field"),
        ("of: sjf", "of: slf", "field checks[0].ratio.of: names 'slf'"),
        ("measure: ttft_mean_ms,", "measure: ttft,", "field checks[0].ratio.measure: names 'ttft'"),
        ("most: 0.8", "", "field checks[0].least: and most are both missing"),
        ("verdict: confirmed", "verdict: true", "field published.outcomes.B.verdict: is true; write one of confirmed"),
        ("recorded: confirmed", "recorded: {A: confirmed}", "field recorded.B: is missing"),
        ("seeds: [42, 123, 456]", "seeds: []", "field seeds: is a list of 0; write a list of at least one"),
        ("seeds: [42", "seeds: [x", "field seeds[0]: is 'x'; write a whole number from 0"),
    ],
)
def test_a_mistake_is_named_with_its_place(old: str, new: str, place: str) -> None:
    assert old in SJF
    with pytest.raises(StudyError) as error:
        parse_study(SJF.replace(old, new), "mine")
    assert str(error.value).startswith("study mine, ")
    assert place in str(error.value)


def test_a_study_is_data() -> None:
    with pytest.raises(StudyError, match="not YAML"):
        parse_study("title: !!python/object/apply:os.getcwd []", "mine")


def test_an_unknown_study_is_told_where_the_names_are() -> None:
    with pytest.raises(UnknownStudyError, match="study list"):
        load_study("../sjf")


def test_settings_are_laid_over_the_common_ones() -> None:
    """Deep, but a distribution takes the place of another as a whole, and null takes a setting away."""
    common = {"a": {"x": 1, "y": {"distribution": "normal", "mean": 3}}, "b": 2}
    own = {"a": {"y": {"distribution": "constant", "value": 4}, "z": 5}, "b": None}
    assert merged(common, own) == {"a": {"x": 1, "y": {"distribution": "constant", "value": 4}, "z": 5}}
    assert common == {"a": {"x": 1, "y": {"distribution": "normal", "mean": 3}}, "b": 2}
