"""The playable page of worlds, and its server for the same machine."""
