"""Benchmarks, ``gen bench``: cost and fidelity of samplers side by side (``gen.bench.run``)."""
