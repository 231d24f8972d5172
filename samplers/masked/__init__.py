"""Samplers of masked models."""
