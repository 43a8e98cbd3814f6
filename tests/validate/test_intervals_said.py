"""Each interval that is printed says of what it is: of which draws, or over which repetitions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("validate", *(path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "labs").glob("*/__init__.py")))
# Where texts of an interval are made, and what they say of it there.
SAID = {
    "validate/explain/cycles.py": "draws of blocks of steps",
    "validate/explain/text.py": "for another recording of the load",
    "validate/fit/text.py": "draws of blocks of neighbouring",
    "labs/planted/known_servers.py": "hold the true coefficient",
    "labs/synthetic/load_search.py": "of the coefficients and of steps beyond the fit",
    "labs/studies/pairs.py": "the interval that the fit leaves possible",
    "labs/verification/cli.py": "over independent replications",
    "validate/comparison/differences.py": "intervals: ",  # and what was drawn, which only the comparison knows
    "validate/comparison/verdict_text.py": "another recording of the same load",
    "validate/ci.py": "for another recording of the load",
    "validate/comparison/sweep.py": "for another recording of the load",
    "validate/report/sweep_chart.py": "for another recording of the load",
    "validate/history_text.py": "for another recording of the load",
    "validate/report/history_chart.py": "for another recording of the load",
    "validate/what_if.py": "of the coefficients and of steps beyond the fit",
    "validate/gating/reports.py": "of both errors on the same requests",
    "validate/report/latency_charts.py": "for another recording of the same load",
}
# They speak of intervals and print none.
PRINTS_NONE = {
    "labs/cluster/config.py",
    "labs/cluster/router.py",
    "labs/planted/writers_inference_perf.py",
    "validate/cli/calibrate.py",
    "validate/cli/validate.py",
    "validate/comparison/pages.py",
    "validate/comparison/bounds.py",
    "validate/comparison/overview.py",
    "validate/gating/judging.py",
    "validate/laws.py",
    "validate/text/messages.py",
}


def texts(path: Path) -> list[str]:
    """The texts of a module that are no docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, kinds) and _is_text(node.body)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in first)
    return [node.value for node in found if isinstance(node.value, str)]


def _is_text(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Expr)


@pytest.mark.slow
def test_each_module_that_prints_an_interval_says_of_what() -> None:
    """A module that begins to print one is to say it, and to stand in the list above."""
    told = {path.relative_to(ROOT).as_posix(): texts(path) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    speaking = {
        name for name, found in told.items() if any(re.search(r"\binterval|\b9\d(\.\d)? %", text) for text in found)
    }
    assert speaking - PRINTS_NONE == SAID.keys()
    assert [name for name, said in SAID.items() if not any(said in text for text in told[name])] == []
