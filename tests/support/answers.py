"""The answer about one comparison, as `validate` gives it with -v."""

from __future__ import annotations

from blis_replay.ingest.tables import Table
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.pages import DATA_COLUMNS, comparison_json, comparison_page, data_rows
from blis_replay.validate.judgement import exit_code
from blis_replay.validate.text.answer import Answer


def comparison_answer(comparison: Comparison) -> Answer:
    rows = Table("", DATA_COLUMNS, data_rows(comparison))
    return Answer(comparison_page(comparison), comparison_json(comparison), rows, exit_code([comparison.verdict]))
