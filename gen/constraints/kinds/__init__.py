"""Kinds of constraints, one file each: the keys of ``structured``."""
