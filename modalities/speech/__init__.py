"""Speech of a synthetic dataset of spoken words."""
