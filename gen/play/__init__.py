"""Worlds that are played step by step."""
