-- Ground-truth store, schema version 8 (store.file.SCHEMA_VERSION).  The frames of a recording have the same columns
-- (recording.columns_of).  A column is null where the recording does not say.
-- Times are int64 microseconds from the experiment's zero (the send of its first request).
-- No primary keys: one writer replaces a recording as a whole inside one transaction.

CREATE TABLE IF NOT EXISTS meta (key VARCHAR NOT NULL, value VARCHAR NOT NULL);

CREATE TABLE IF NOT EXISTS experiments (
    slug VARCHAR NOT NULL,
    alias VARCHAR NOT NULL,
    workload VARCHAR NOT NULL,
    model VARCHAR,                          -- null: no file names one
    hardware VARCHAR,
    tensor_parallelism BIGINT,
    ground_truth VARCHAR NOT NULL,          -- recorded | published aggregates | arrival trace
    content_hash VARCHAR NOT NULL,
    derived_hash VARCHAR NOT NULL,          -- engine arguments, findings and token layout
    ignore_eos BOOLEAN,
    prefix_hit_rate DOUBLE,                 -- 0..1, an aggregate
    token_layout VARCHAR NOT NULL,
    missing VARCHAR NOT NULL,               -- JSON list of sentences
    num_groups BIGINT,                      -- the shared-prefix workload, null if it is none
    num_prompts_per_group BIGINT,
    system_prompt_tokens BIGINT,
    question_tokens BIGINT,
    output_tokens BIGINT,
    dropped_step_events BIGINT NOT NULL,    -- events of step spans that the tracing SDK discarded
    load_profile VARCHAR,                   -- the load as declared: JSON object, recording.LoadProfile
    read_by VARCHAR                         -- hash of the program that read the files; null: not read from files
);

CREATE TABLE IF NOT EXISTS source_files (
    slug VARCHAR NOT NULL,
    position BIGINT NOT NULL,
    name VARCHAR NOT NULL,                  -- path inside the recording
    kind VARCHAR NOT NULL,
    bytes BIGINT NOT NULL,
    sha256 VARCHAR NOT NULL,
    records BIGINT NOT NULL,
    rejected_count BIGINT NOT NULL
);

CREATE TABLE IF NOT EXISTS rejected_records (             -- the first of each file; rejected_count has them all
    slug VARCHAR NOT NULL,
    file_position BIGINT NOT NULL,
    position BIGINT NOT NULL,
    place VARCHAR NOT NULL,
    reason VARCHAR NOT NULL
);

CREATE TABLE IF NOT EXISTS engine_args (
    slug VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    value VARCHAR NOT NULL,                 -- JSON scalar
    source VARCHAR NOT NULL,                -- recorded | profile | file | default
    detail VARCHAR NOT NULL
);

CREATE TABLE IF NOT EXISTS stages (slug VARCHAR NOT NULL, stage BIGINT NOT NULL, rate_per_s DOUBLE NOT NULL,
    duration_us BIGINT NOT NULL);

CREATE TABLE IF NOT EXISTS clocks (
    slug VARCHAR NOT NULL,
    position BIGINT NOT NULL,
    name VARCHAR NOT NULL,                  -- client | server | step
    kind VARCHAR NOT NULL,                  -- epoch | monotonic | relative
    zero_us BIGINT NOT NULL,                -- what this clock showed at the experiment's zero
    constructed BOOLEAN NOT NULL,
    placed VARCHAR NOT NULL,                -- how zero_us was found (see recording.Clock), '' for the requests'
    uncertainty_us BIGINT,                  -- of an estimated zero_us
    stamped_zero_us BIGINT                  -- zero_us by the recording's own stamps, believed or not
);

CREATE TABLE IF NOT EXISTS requests (       -- in send order
    slug VARCHAR NOT NULL,
    request_index BIGINT NOT NULL,          -- 0, 1, ...
    request_id VARCHAR,                     -- the recording's own name for it
    stage BIGINT,                           -- load stage
    arrival_us BIGINT,                      -- client send, or arrival at the server's front end
    arrival_within_us BIGINT,               -- estimate of how far from arrival_us it came; null where it was stamped
    prompt_tokens BIGINT,                   -- null also where the recording lost it (failed requests)
    output_tokens BIGINT,                   -- true decode length
    output_tokens_source VARCHAR,           -- one of recording.OUTPUT_LENGTH_SOURCES
    output_tokens_reported BIGINT,          -- as the recording has it, trusted or not
    max_tokens BIGINT,
    ttft_us BIGINT,
    e2e_us BIGINT,                          -- of a failed request: how long the client held on
    queue_us BIGINT,                        -- server: queued to first scheduled
    prefill_us BIGINT,                      -- server: first scheduled to first token
    decode_us BIGINT,                       -- server: first token to last token
    cached_prompt_tokens BIGINT,            -- prefix-cache hit where the server reported it
    status VARCHAR,                         -- ok | error | timeout | aborted: the client ended the run, or gave up as configured
    error VARCHAR
);

-- metric: e2e | ttft | itl_reported | tpot_reported | prompt_tokens | output_tokens_reported, all over successes; TPOT is
-- (last token - first token) / (n - 1); tools that mean something else by it have tpot_with_ttft_reported, (last token -
-- send) / n, or tpot_over_n_reported, (last token - first token) / n; requests: the counts of the report, statistics
-- "sent", "succeeded", "failed"; schedule_delay: from when the client meant to send to when it did; server_...: what the
-- server itself counted and timed (/metrics), statistics "count", "mean", "sum" and those.
CREATE TABLE IF NOT EXISTS aggregates (     -- what was published or reported, a row a number
    slug VARCHAR NOT NULL,
    stage BIGINT,                           -- -1: the whole run
    metric VARCHAR,
    statistic VARCHAR,                      -- mean, min, p0.1, p1, p5, p10, p25, p50, p75, p90, p95, p99, p99.9, max
    value DOUBLE                            -- us for latencies, tokens for lengths
);

CREATE TABLE IF NOT EXISTS steps (          -- recorded engine steps, all or a sample
    slug VARCHAR NOT NULL,
    step_id BIGINT,
    start_us BIGINT,                        -- start of schedule(), on the step clock
    duration_us BIGINT,                     -- CPU time inside schedule(); not the step cycle
    running_depth BIGINT,
    waiting_depth BIGINT,
    prefill_requests BIGINT,
    decode_requests BIGINT,
    prefill_tokens BIGINT,
    decode_tokens BIGINT,
    preempted_requests BIGINT,
    kv_usage DOUBLE,
    kv_blocks_total BIGINT,
    kv_blocks_free BIGINT
);

CREATE TABLE IF NOT EXISTS prefix_identity (slug VARCHAR NOT NULL, source VARCHAR NOT NULL);

CREATE TABLE IF NOT EXISTS prompts (        -- distinct ones, as a tree of what they share
    slug VARCHAR NOT NULL,
    prompt BIGINT NOT NULL,                 -- 0, 1, ...
    parent BIGINT,                          -- an earlier prompt with which it begins
    shared_tokens BIGINT NOT NULL,          -- how far the two are equal
    tokens BIGINT NOT NULL                  -- how far requests with this prompt are equal; beyond, they are like no other
);

CREATE TABLE IF NOT EXISTS request_prompts (slug VARCHAR NOT NULL, request_index BIGINT NOT NULL, prompt BIGINT NOT NULL);

CREATE TABLE IF NOT EXISTS findings (
    slug VARCHAR NOT NULL,
    position BIGINT NOT NULL,
    check_name VARCHAR NOT NULL,
    severity VARCHAR NOT NULL,              -- note | corrected | unusable
    metric VARCHAR NOT NULL,
    message VARCHAR NOT NULL,
    measured VARCHAR NOT NULL,              -- JSON object
    threshold VARCHAR NOT NULL
);

CREATE TABLE IF NOT EXISTS snapshots (                    -- running requests of the steps that were recorded in full
    slug VARCHAR NOT NULL,
    step_id BIGINT,
    request_id VARCHAR,                     -- the engine's own: lifecycles.core_request_id
    prompt_tokens BIGINT,
    effective_prompt_tokens BIGINT,         -- without those that the first admission found in the prefix cache
    computed_tokens BIGINT,                 -- before this step's
    output_tokens BIGINT,
    scheduled_tokens BIGINT                 -- in this step
);

CREATE TABLE IF NOT EXISTS lifecycles (                   -- requests as the server traced them
    slug VARCHAR NOT NULL,
    journey BIGINT NOT NULL,                -- order of arrival at the server
    request_index BIGINT,                   -- of requests, null where identities do not tell
    api_request_id VARCHAR,
    core_request_id VARCHAR,
    arrived_us BIGINT,                      -- at the API server, prompt tokenised
    queued_us BIGINT,
    scheduled_us BIGINT,                    -- first
    first_token_us BIGINT,                  -- when the scheduler had it
    first_response_us BIGINT,               -- when the API server had it
    finished_us BIGINT,
    departed_us BIGINT,                     -- answer sent, or given up by the client
    queued_step BIGINT,                     -- last step begun before
    scheduled_step BIGINT,
    first_token_step BIGINT,                -- the step that computed it
    finished_step BIGINT,
    preemptions BIGINT,
    status VARCHAR,                         -- ok | aborted | error | unfinished
    prompt_tokens BIGINT,
    max_tokens BIGINT,
    output_tokens BIGINT,                   -- produced, also by an aborted one
    cached_prompt_tokens BIGINT             -- prefix-cache hit of the first admission
);

CREATE TABLE IF NOT EXISTS journey_events (               -- what happened to them, by journey and time
    slug VARCHAR NOT NULL,
    journey BIGINT NOT NULL,
    event VARCHAR NOT NULL,                 -- as recorded: api.ARRIVED, journey.QUEUED, ...
    time_us BIGINT,
    step_id BIGINT,
    output_tokens BIGINT,
    finish_status VARCHAR                   -- stopped | length | aborted | ignored | error
);

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

-- Steps as the server's log has them (--enable-logging-iteration-details), by engine and index.
-- A request is in prefill until it has an output token, so that one which computes its tokens again is in decode.
CREATE TABLE IF NOT EXISTS iterations (
    slug VARCHAR NOT NULL,
    engine BIGINT,                          -- data-parallel rank
    iteration BIGINT,                       -- counts from 0 within one start of the server
    prefill_requests BIGINT,                -- without an output token yet
    prefill_tokens BIGINT,
    decode_requests BIGINT,
    decode_tokens BIGINT,
    elapsed_us BIGINT,                      -- waiting for the model's result: not the cycle, and asynchronously not the step
    kv_usage DOUBLE,                        -- 0..1 to a thousandth, after the step
    dummy BOOLEAN,                          -- a step without requests, in which an engine only kept pace with the others
    logged_us BIGINT,                       -- whole seconds, from the stamp of the first iteration
    start_us BIGINT,                        -- from the experiment's zero, worked out; null: not placed
    uncertainty_us BIGINT                   -- how far the true start can be from it
);
