"""A simulator's own CI: a toy repository of 40 commits with three planted faults, and one with a drift."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import Run
from git_commands import git

pytestmark = pytest.mark.heavy

# The server: 30 ms and 30 us per prompt token, then 8 ms per output token, with 5 % noise per request.
_FIRST_US, _PROMPT_US, _TOKEN_US, _NOISE = 30_000, 30, 8_000, 0.05
_COMMITS = 40

# The three historical faults, with the commits that have them: requests are injected late, so TTFT is 28 times as long;
# a replay of its own trace is 11 times off in the step time; the prefix cache is looked up and saves nothing.
_FAULTS = {"late injection": range(8, 13), "step time": range(20, 22), "prefix cache": range(30, 36)}

_SIMULATOR = """
import csv, json, sys
from pathlib import Path

INJECTION, STEP, CACHED, SLOWER = {injection}, {step}, {cached}, {slower}
folder = Path(sys.argv[-1])
with (folder / "requests.csv").open() as file:
    requests = list(csv.DictReader(file))
with (folder / "results.csv").open("w") as file:
    file.write("request_index,ttft_us,e2e_us\\n")
    for one in requests:
        ttft_us = INJECTION * (30_000 + 30 * int(one["prompt_tokens"]) + CACHED * 10 * int(one["prompt_tokens"]))
        e2e_us = ttft_us + STEP * SLOWER * 8_000 * (int(one["output_tokens"]) - 1)
        file.write(f"{{one['request_index']}},{{ttft_us:.0f}},{{e2e_us:.0f}}\\n")
header = {{"name": "toy", "version": "1", "not_modelled": [], "fitted_on": []}}
(folder / "simulator.json").write_text(json.dumps(header))
"""


def simulator(commit: int, drift: float = 0.0) -> str:
    has = {name: commit in commits for name, commits in _FAULTS.items()}
    return _SIMULATOR.format(
        injection=28 if has["late injection"] and not drift else 1,
        step=11 if has["step time"] and not drift else 1,
        cached=1 if has["prefix cache"] and not drift else 0,
        slower=1 + drift * max(commit - 10, 0),
    )


def write_recording(path: Path) -> None:
    """400 requests over 400 s, as a table of a load generator."""
    rng = np.random.default_rng(48)
    prompt, output = rng.integers(500, 3_000, 400), rng.integers(50, 200, 400)
    noise = rng.normal(1, _NOISE, (2, 400))
    ttft_us = noise[0] * (_FIRST_US + _PROMPT_US * prompt)
    e2e_us = ttft_us + noise[1] * _TOKEN_US * (output - 1)
    rows = zip(np.arange(400), prompt, output, ttft_us / 1e3, e2e_us / 1e3, strict=True)
    lines = [f"{at},{p},{o},{ttft:.3f},{e2e:.3f}" for at, p, o, ttft, e2e in rows]
    path.write_text("arrival,prompt_tokens,output_tokens,ttft,e2e\n" + "\n".join(lines) + "\n")


@pytest.fixture
def recorded(run: Run, tmp_path: Path) -> Run:
    write_recording(tmp_path / "mine.csv")
    columns = "arrival=arrival:s,ttft=ttft:ms,e2e=e2e:ms"
    answer = run("ingest", "mine.csv", "--columns", columns, "--model", "toy", "--name", "mine", "-q")
    assert (answer.code, answer.err) == (0, "")
    git(tmp_path, "init", "-q", "-b", "main")
    return run


def commits(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> tuple[list[str], list[int]]:
    """Ids of all commits, and the exit code of the CI job of each; with a drift up to the first that fails."""
    made, codes = [], []
    for number in range(_COMMITS):
        (folder / "sim.py").write_text(simulator(number, drift))
        (folder / "version").write_text(str(number))
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-11-{1 + number // 24:02d}T{number % 24:02d}:00:00Z")
        git(folder, "add", "sim.py", "version")
        git(folder, "commit", "-q", "-m", f"commit {number}")
        made.append(git(folder, "rev-parse", "HEAD"))
        command = f"cmd:{Path(sys.executable).name} sim.py"
        codes.append(run("validate", "mine", "--simulator", command, "--record", "history.jsonl", "-q").code)
        if drift and codes[-1] == 1:
            break
    return made, codes


def test_ci_goes_red_at_three_faults_and_the_history_names_them(
    recorded: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, codes = commits(recorded, tmp_path, monkeypatch)
    faulty = sorted(number for numbers in _FAULTS.values() for number in numbers)
    assert [number for number, code in enumerate(codes) if code == 1] == faulty
    assert {code for number, code in enumerate(codes) if number not in faulty} == {0}
    answer = recorded("compare", "--history", "history.jsonl", "--json")
    assert answer.code == 0
    of_ttft, of_itl = (
        next(s for s in answer.json["series"] if (s["metric"], s["statistic"]) == (metric, "mean"))
        for metric in ("ttft", "itl")
    )
    places = {commit: number for number, commit in enumerate(made)}

    def stretches(series: dict[str, list[dict[str, str]]]) -> list[tuple[int, int, int]]:
        return [(places[one["after"]], places[one["first"]], places[one["fixed"]]) for one in series["beyond"]]

    assert stretches(of_ttft) == [(7, 8, 13), (29, 30, 36)]
    assert stretches(of_itl) == [(19, 20, 22)]
    assert [places[change["first"]] for change in of_ttft["changes"]] == [8, 13, 30, 36]
    page = recorded("compare", "--history", "history.jsonl").out
    assert max(map(len, page.splitlines())) <= 80
    assert made[8][:8] in page


def test_change_points_find_a_drift_of_half_a_percent_before_its_limit(
    recorded: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From commit 11 on each is 0.5 % slower: the limit of 10 % is passed for sure after 20, ITL's of 15 % after 30."""
    made, codes = commits(recorded, tmp_path, monkeypatch, drift=0.005)
    red = codes.index(1)
    lines = (tmp_path / "history.jsonl").read_text("utf-8").splitlines()
    named = None
    for number in range(11, red):
        (tmp_path / "so-far.jsonl").write_text(
            "\n".join(one for one in lines if any(c in one for c in made[: number + 1]))
        )
        answer = recorded("compare", "--history", "so-far.jsonl", "--fail-if", "itl=+2%", "--json")
        if answer.code:
            named = number
            break
    assert named is not None
    assert named <= 20
    assert red >= named + 8
    itl = next(s for s in answer.json["series"] if (s["metric"], s["statistic"]) == ("itl", "mean"))
    first = itl["changes"][0]
    assert made.index(first["earliest"]) - 1 <= 11 <= made.index(first["latest"])
