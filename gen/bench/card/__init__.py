"""Measurements of gen on an accelerator within minutes: ``python -m gen.bench.card``."""
