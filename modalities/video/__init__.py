"""Clips of moving shapes."""
