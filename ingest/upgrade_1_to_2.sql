-- From schema version 1 to 2, followed by schema_journeys.sql, schema_token_events.sql and upgrade_1_to_2_stamps.sql.  Version 1 never filled its journey_events.
ALTER TABLE clocks ADD COLUMN spread_us BIGINT;

DROP TABLE journey_events;

ALTER TABLE token_events RENAME TO single_stamps;
