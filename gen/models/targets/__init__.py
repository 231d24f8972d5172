"""Targets: a model with its prompts and sampling parameters, as samplers see it."""
