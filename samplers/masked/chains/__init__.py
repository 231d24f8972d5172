"""Lossless decoding of masked models by chains of drafts."""
