"""The SQL of this package.  Values are bound (``?``, ``$name``), never pasted.

Where a table's name varies it comes from a constant of this module, never from input.
"""

from __future__ import annotations

# Tables that hold one recording, all keyed by slug.
RECORDING_TABLES = (
    "experiments",
    "source_files",
    "rejected_records",
    "engine_args",
    "stages",
    "clocks",
    "requests",
    "aggregates",
    "token_events",
    "prefix_identity",
    "request_blocks",
    "kv_events",
    "steps",
    "snapshots",
    "lifecycles",
    "journey_events",
    "findings",
)

RUN_TABLES = ("runs", "run_requests", "run_steps", "errors")

# Stamps of each request, and how many of them are output tokens (``token_layout.TokenLayout``):
# a token's first stamp is every ``stamps_per_token``-th one; the leading event and the closing one
# of a completed stream are taken off, and nothing beyond a trusted length is a token.
STAMPS_OF_REQUESTS = """
WITH stamps AS (
    SELECT request_index, count(*) AS stamps, min(time_us) AS first_us, max(time_us) AS last_us,
           min(time_us) FILTER (WHERE event_index = $leading_events * $stamps_per_token) AS first_token_us
    FROM read_parquet($events) GROUP BY request_index
), lines AS (
    SELECT s.*, r.trusted_tokens, r.completed,
           (s.stamps + $stamps_per_token - 1) // $stamps_per_token AS data_lines
    FROM stamps s LEFT JOIN lengths r USING (request_index)
)
SELECT request_index, stamps, first_us, last_us, first_token_us, completed,
       greatest(0, CASE WHEN NOT $identified THEN 0
            ELSE least(coalesce(trusted_tokens, data_lines),
                       data_lines - $leading_events
                       - CASE WHEN coalesce(completed, true) THEN $closing_events ELSE 0 END)
            END) AS tokens
FROM lines
"""

INSERT_STAMPS = """
INSERT INTO token_events
SELECT $slug, e.request_index, e.event_index, e.time_us,
       CASE WHEN e.event_index % $per_token = 0 AND e.event_index // $per_token - $leading BETWEEN 0 AND c.tokens - 1
            THEN e.event_index // $per_token - $leading END
FROM read_parquet($events) e JOIN token_counts c USING (request_index)
"""

# Gaps of a few hundred requests, to tell how a client stamped its stream.
SAMPLED_GAPS = """
WITH gaps AS (
    SELECT request_index, event_index,
           lead(time_us) OVER (PARTITION BY request_index ORDER BY event_index) - time_us AS gap_us
    FROM read_parquet($events) WHERE request_index IN (SELECT request_index FROM sampled)
)
SELECT request_index, count(*) AS stamps,
       coalesce(avg((gap_us < $tiny_us)::INT) FILTER (WHERE event_index % 2 = 0 AND gap_us IS NOT NULL), 0)
           AS even_tiny_share,
       median(gap_us) FILTER (WHERE event_index % 2 = 0) AS even_gap_us,
       median(gap_us) FILTER (WHERE event_index % 2 = 1) AS odd_gap_us,
       arg_max(gap_us, event_index) FILTER (WHERE event_index % 2 = 1 AND gap_us IS NOT NULL) AS last_odd_gap_us,
       median(gap_us) AS gap_us,
       arg_min(gap_us, event_index) FILTER (WHERE gap_us IS NOT NULL) AS first_gap_us,
       arg_max(gap_us, event_index) FILTER (WHERE gap_us IS NOT NULL) AS last_gap_us
FROM gaps GROUP BY request_index ORDER BY request_index
"""

# Pooled mean gap as stamped and between output tokens, over completed requests.
POOLED_GAPS = """
SELECT count(*) AS requests, sum(c.stamps) AS stamps, sum(c.tokens) AS tokens,
       sum(c.last_us - c.first_us) AS stamped_us, sum(c.stamps - 1) AS stamped_gaps,
       sum(e.time_us - c.first_token_us) AS token_us, sum(c.tokens - 1) AS token_gaps
FROM token_counts c JOIN read_parquet($events) e
  ON e.request_index = c.request_index AND e.event_index = (c.tokens - 1 + $leading) * $per_token
WHERE c.completed AND c.tokens > 0
"""

OUTPUT_TIMES = """
SELECT request_index, token_index, time_us FROM token_events
WHERE slug = $slug AND token_index IS NOT NULL ORDER BY request_index, token_index
"""

POOLED_OUTPUT_GAPS = """
WITH gaps AS (
    SELECT time_us - lag(time_us) OVER (PARTITION BY request_index ORDER BY token_index) AS gap_us
    FROM token_events
    WHERE slug = $slug AND token_index IS NOT NULL
      AND request_index IN (SELECT request_index FROM requests WHERE slug = $slug AND status = 'ok')
      AND ($all_requests OR request_index IN (SELECT request_index FROM chosen_requests))
)
SELECT gap_us, count(*) AS count FROM gaps WHERE gap_us IS NOT NULL GROUP BY gap_us ORDER BY gap_us
"""

# Four bins a decade, from 1 us on; what is below is counted in the first.
STAMP_GAPS = """
WITH gaps AS (
    SELECT time_us - lag(time_us) OVER (PARTITION BY request_index ORDER BY event_index) AS gap_us
    FROM token_events WHERE slug = $slug
)
SELECT floor(4 * log10(greatest(gap_us, 1)))::BIGINT AS bin, count(*) AS count
FROM gaps WHERE gap_us IS NOT NULL GROUP BY bin
"""

PREFIX_IDENTITY = "SELECT block_tokens, source FROM prefix_identity WHERE slug = ?"

REQUEST_BLOCKS = """
SELECT request_index, block_index, block_key FROM request_blocks WHERE slug = $slug ORDER BY request_index, block_index
"""

INSERT_REQUEST_BLOCKS = """
INSERT INTO request_blocks SELECT ?, request_index, block_index, block_key FROM blocks_to_store
"""

# One row a kind of KV-cache event and medium, blocks and tokens summed.
KV_EVENT_COUNTS = """
SELECT event, medium, target_medium, count(*) AS events, sum(blocks)::BIGINT AS blocks,
       sum(tokens)::BIGINT AS tokens, count(*) FILTER (WHERE NOT success) AS failed
FROM kv_events WHERE slug = ? GROUP BY ALL ORDER BY event, medium, target_medium
"""

LIST_EXPERIMENTS = """
SELECT e.slug, e.alias, e.model, e.hardware, e.tensor_parallelism, e.workload, e.ground_truth,
       (SELECT count(*) FROM requests r WHERE r.slug = e.slug) AS requests,
       (SELECT count(*) FROM requests r WHERE r.slug = e.slug AND r.status NOT IN ('ok', 'aborted')) AS failed,
       EXISTS (SELECT 1 FROM findings f WHERE f.slug = e.slug AND f.check_name = 'overloaded') AS overloaded,
       (SELECT count(*) FROM findings f WHERE f.slug = e.slug) AS findings
FROM experiments e ORDER BY e.slug
"""
