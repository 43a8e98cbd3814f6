-- From schema version 2 to 3.  Null: read by a program that did not keep it; ingesting again fills it in.
ALTER TABLE experiments ADD COLUMN load_profile VARCHAR;
