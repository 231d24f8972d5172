"""Relaxed verifiers, one rule per file."""
