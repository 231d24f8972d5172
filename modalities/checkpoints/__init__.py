"""Families of published checkpoints, one file each."""
