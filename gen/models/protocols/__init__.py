"""Protocols: one file for each way in which a model can be asked for tokens."""
