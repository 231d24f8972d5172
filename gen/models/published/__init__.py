"""Networks of published checkpoints."""
