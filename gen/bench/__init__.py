"""``gen bench``: what samplers cost and give, side by side in one run (``gen.bench.run``)."""
