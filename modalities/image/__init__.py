"""Images of a synthetic dataset of captioned shapes."""
