"""``blis-replay compare`` as a user meets it."""

from __future__ import annotations

import pytest
from command_line import Run
from json_docs import documented

pytestmark = pytest.mark.slow


def test_two_releases_on_an_experiment(run: Run) -> None:
    """The published direct calibration has 18,920.66 us where ours has 17,629.28 (both files say so)."""
    answer = run("compare", "h100-vllm-0.15.1", "stepml-direct", "--experiment", "mixtral-codegen")
    assert (answer.code, answer.err) == (0, "")
    text = " ".join(answer.out.split())
    assert "A: mixtral-codegen replayed by embedded with h100-vllm-0.15.1 (9,000 requests)" in text
    assert "step time intercept A: 17629.284 us B: 18920.656 us" in text
    assert "request by request: E2E MAPE" in answer.out
    assert max(len(line) for line in answer.out.splitlines()) <= 80


def test_all_simulators_fit_80_columns_and_every_column_is_named(run: Run) -> None:
    page = run("compare", "tiny-live-a", "--simulators", "embedded,floor:constant,floor:line").out
    assert max(map(len, page.splitlines())) <= 80
    assert "MB" not in page


@pytest.mark.heavy
@pytest.mark.usefixtures("all_bundled")
def test_published_answers_and_every_field_of_the_json_documented(run: Run) -> None:
    published = run("compare", "--published", "--json").json
    assert {entry["name"] for entry in published["simulators"]} >= {"BLIS trained-physics", "step-model direct"}
    two = run("compare", "34b-general", "34b-general@h100-vllm-0.15.1", "--json").json
    fields = {*published, *published["simulators"][0], *two, *two["a"], *two["metrics"]["itl"]["p99"]}
    assert sorted(fields - documented("compare")) == []
