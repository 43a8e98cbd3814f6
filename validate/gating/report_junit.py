"""The answer of a gate as JUnit XML, the form in which CI systems read test results."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from blis_replay.ingest.printable import printable
from blis_replay.validate.gating.report_text import against
from blis_replay.validate.gating.verdicts import Check, GateReport, Judgement


def gate_junit(report: GateReport) -> str:
    """A suite an experiment and one of the gate as a whole, a case a check.

    What failed is a ``failure``, what could not be judged an ``error``, an experiment that is
    not gated a ``skipped`` case.
    """
    root = Element("testsuites", name=printable(f"blis-replay gate: {against(report)}"))
    for judgement in report.judgements:
        _suite(root, judgement.alias, judgement.checks, judgement)
    _suite(root, "the gate as a whole", report.checks)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, name: str, checks: tuple[Check, ...], judgement: Judgement | None = None) -> None:
    suite = SubElement(root, "testsuite", name=printable(name))
    for check in checks:
        _case(suite, name, check)
    if judgement is not None and judgement.outcome is None:
        case = SubElement(suite, "testcase", classname=printable(name), name="not gated")
        SubElement(case, "skipped", message=printable(judgement.reason))
    suite.set("tests", str(len(suite)))
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{tag}"))))


def _case(suite: Element, name: str, check: Check) -> None:
    title = " ".join(part for part in (check.rule, check.metric, check.statistic) if part)
    case = SubElement(suite, "testcase", classname=printable(name), name=title)
    message = printable(check.message)
    if check.outcome == "pass":
        SubElement(case, "system-out").text = message
    else:
        SubElement(case, "failure" if check.outcome == "fail" else "error", message=message)
