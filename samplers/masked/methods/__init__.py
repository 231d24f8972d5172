"""Masked samplers, one paper per file."""
