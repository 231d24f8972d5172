"""Scorers that serve every modality."""
