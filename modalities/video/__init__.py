"""Clips of a synthetic dataset of moving shapes."""
