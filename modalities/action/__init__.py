"""Robot action chunks on a tabletop."""
