-- Steps as the server's log has them, since schema version 5 (see schema.sql, recording.ITERATION_SCHEMA).

CREATE TABLE IF NOT EXISTS iterations (
    slug VARCHAR NOT NULL,
    engine BIGINT,                          -- data-parallel rank
    iteration BIGINT,                       -- counts from 0 within one start of the server
    prefill_requests BIGINT,                -- without an output token yet
    prefill_tokens BIGINT,
    decode_requests BIGINT,
    decode_tokens BIGINT,
    elapsed_us BIGINT,                      -- waiting for the model's result
    kv_usage DOUBLE,
    dummy BOOLEAN,
    logged_us BIGINT,                       -- whole seconds, from the stamp of the first iteration
    start_us BIGINT,                        -- from the experiment's zero, worked out; null: not placed
    uncertainty_us BIGINT
);
