"""Parts of masked samplers."""
