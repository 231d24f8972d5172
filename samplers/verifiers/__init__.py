"""Verifiers of drafts, and the acceptance that no verifier can exceed."""

from gen.samplers.verifiers.bounds import optimal_acceptance

__all__ = ["optimal_acceptance"]
