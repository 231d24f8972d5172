"""Errors, the registry, token spaces, sampling parameters, random numbers: what everything rests
on."""
