"""Contracts that an author implements: modality, frontend, checkpoint family, token layout."""
