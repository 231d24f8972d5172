"""Initialisers: the first draft of a position that has just entered the window (``base``)."""
