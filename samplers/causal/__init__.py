"""Samplers of causal models."""
