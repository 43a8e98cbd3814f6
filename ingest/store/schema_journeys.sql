-- What the server's own traces tell of requests, since schema version 2 (see schema.sql).

CREATE TABLE IF NOT EXISTS snapshots (                    -- running requests of the steps that were recorded in full
    slug VARCHAR NOT NULL,
    step_id BIGINT,
    request_id VARCHAR,                     -- the engine's own: lifecycles.core_request_id
    prompt_tokens BIGINT,
    effective_prompt_tokens BIGINT,         -- without those that the first admission found in the prefix cache
    computed_tokens BIGINT,                 -- before this step's
    output_tokens BIGINT,
    scheduled_tokens BIGINT
);

CREATE TABLE IF NOT EXISTS lifecycles (                   -- requests as the server traced them
    slug VARCHAR NOT NULL,
    journey BIGINT NOT NULL,                -- order of arrival at the server
    request_index BIGINT,                   -- of requests, null where identities do not tell
    api_request_id VARCHAR,
    core_request_id VARCHAR,
    arrived_us BIGINT,
    queued_us BIGINT,
    scheduled_us BIGINT,                    -- first
    first_token_us BIGINT,
    first_response_us BIGINT,
    finished_us BIGINT,
    departed_us BIGINT,                     -- or given up
    queued_step BIGINT,
    scheduled_step BIGINT,
    first_token_step BIGINT,
    finished_step BIGINT,
    preemptions BIGINT,
    status VARCHAR,                         -- ok | aborted | error | unfinished
    prompt_tokens BIGINT,
    max_tokens BIGINT,
    output_tokens BIGINT,
    cached_prompt_tokens BIGINT
);

CREATE TABLE IF NOT EXISTS journey_events (               -- what happened to them, by journey and time
    slug VARCHAR NOT NULL,
    journey BIGINT NOT NULL,
    event VARCHAR NOT NULL,
    time_us BIGINT,
    step_id BIGINT,
    output_tokens BIGINT,
    finish_status VARCHAR                   -- stopped | length | aborted | ignored | error
);
