"""Rules that make one answer of several."""
