"""Finding and loading weights."""
