"""Training of drafters for a causal model: ``python -m gen.recipes.drafters``."""
