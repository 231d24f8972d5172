"""Spoken words."""
