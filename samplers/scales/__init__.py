"""Samplers of next-scale models."""
