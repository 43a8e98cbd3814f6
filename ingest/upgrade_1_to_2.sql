-- From schema version 1 to 2, followed by schema_journeys.sql.  Version 1 never filled its journey_events.
ALTER TABLE clocks ADD COLUMN spread_us BIGINT;

DROP TABLE journey_events;
