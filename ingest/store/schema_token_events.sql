-- Stream stamps, since schema version 2 (see schema.sql).

-- A row has a run of consecutive stamps of a request: one per row would take four times as long to write.
CREATE TABLE IF NOT EXISTS token_event_runs (
    slug VARCHAR NOT NULL,
    request_index BIGINT NOT NULL,
    first_event BIGINT NOT NULL,            -- event_index of the first of them
    tokens BIGINT NOT NULL,                 -- of the request
    stamps_per_token BIGINT NOT NULL,       -- token k is event (k + leading_events) * stamps_per_token
    leading_events BIGINT NOT NULL,
    times_us BIGINT[] NOT NULL
);

CREATE VIEW IF NOT EXISTS token_events AS
SELECT slug, request_index, event_index, time_us,
       CASE WHEN event_index % stamps_per_token = 0
                 AND event_index // stamps_per_token - leading_events BETWEEN 0 AND tokens - 1
            THEN event_index // stamps_per_token - leading_events END AS token_index -- null: not an output token
FROM (
    SELECT slug, request_index, tokens, stamps_per_token, leading_events, unnest(times_us) AS time_us,
           first_event + generate_subscripts(times_us, 1) - 1 AS event_index
    FROM token_event_runs
);
