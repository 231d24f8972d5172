"""Robot action chunks on a synthetic tabletop."""
