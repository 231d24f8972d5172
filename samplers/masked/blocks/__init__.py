"""Samplers of block models."""
