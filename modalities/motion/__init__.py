"""Human motion."""
