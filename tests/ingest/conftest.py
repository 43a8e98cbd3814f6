"""Puts this folder on the import path, so that the folders below share ``builders``."""
