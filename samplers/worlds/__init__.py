"""Samplers of worlds: frame after frame, each given an action."""
