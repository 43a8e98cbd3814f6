-- From schema version 1 to 2, followed by the schema itself and upgrade_1_to_2_stamps.sql.  Version 1 never filled its journey_events.
ALTER TABLE clocks ADD COLUMN placed VARCHAR DEFAULT '';
ALTER TABLE clocks ADD COLUMN uncertainty_us BIGINT;
ALTER TABLE clocks ADD COLUMN stamped_zero_us BIGINT;
ALTER TABLE clocks ADD COLUMN spread_us BIGINT;
ALTER TABLE experiments ADD COLUMN dropped_step_events BIGINT DEFAULT 0;
ALTER TABLE experiments ALTER COLUMN model DROP NOT NULL;
DROP TABLE journey_events;

ALTER TABLE token_events RENAME TO single_stamps;
