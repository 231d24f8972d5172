"""Sounds of a synthetic dataset of bouncing balls."""
