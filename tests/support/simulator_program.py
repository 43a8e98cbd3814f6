"""Programs for ``--simulator cmd:``: what each request gets is an expression of its row."""

from __future__ import annotations

_PROGRAM = """
import csv, json, pathlib, sys
folder = pathlib.Path(sys.argv[-1])
rows = list(csv.DictReader((folder / "requests.csv").open()))
lines = []
for row in rows:
    ttft_us = TTFT_US
    lines.append((row["request_index"], ttft_us, ttft_us + REST_US))
columns = "request_index,ttft_us,e2e_us"
header = HEADER
CHANGE
(folder / "results.csv").write_text(columns + "\\n" + "".join("%s,%s,%s\\n" % line for line in lines))
(folder / "simulator.json").write_text(json.dumps(header))
"""


def simulator_program(ttft_us: str, gap_us: int, header: dict[str, object], change: str = "") -> str:
    """The text of a program: ``ttft_us`` in terms of ``row``, then ``gap_us`` a further token.

    ``change``: what it does besides, before it writes its ``lines`` (place, TTFT, E2E) and its ``header``.
    """
    said = {"TTFT_US": ttft_us, "REST_US": f"{gap_us} * (int(row['output_tokens']) - 1)", "CHANGE": change}
    said["HEADER"] = repr({"version": "1", "not_modelled": ["queues"]} | header)
    program = _PROGRAM
    for name, text in said.items():
        program = program.replace(name, text)
    return program
