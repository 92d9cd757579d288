"""The models that the runner can step. Imported from where they are needed; nothing is re-exported here."""
