"""Human motion of a synthetic dataset."""
