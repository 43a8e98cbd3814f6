-- From schema version 3 to 4.  Null: nothing tells which program read it, so its files are parsed when it is ingested again.
ALTER TABLE experiments ADD COLUMN read_by VARCHAR;
