"""Masked models judged by causal ones."""
