"""Locate, read and load weights."""
