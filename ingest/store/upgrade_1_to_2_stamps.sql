-- From a row for every stamp, as schema version 1 had it, to runs of 64; it knew no leading events.
INSERT INTO token_event_runs
SELECT slug, request_index, min(event_index), any_value(tokens), any_value(stamps_per_token), 0,
       list(time_us ORDER BY event_index)
FROM (
    SELECT s.*, CASE WHEN e.token_layout LIKE 'paired%' THEN 2 ELSE 1 END AS stamps_per_token,
           coalesce(max(token_index) OVER (PARTITION BY s.slug, request_index) + 1, 0) AS tokens
    FROM single_stamps s JOIN experiments e ON e.slug = s.slug
)
GROUP BY slug, request_index, event_index // 64 ORDER BY slug, request_index, min(event_index);

DROP TABLE single_stamps;
