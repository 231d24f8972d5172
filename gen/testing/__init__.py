"""Checks of the contract of samplers, for the tests of other packages."""
