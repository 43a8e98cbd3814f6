"""One self-contained HTML page: what a replay is worth, with the evidence."""
