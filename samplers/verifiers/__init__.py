"""Verifiers: which drafts are accepted."""
