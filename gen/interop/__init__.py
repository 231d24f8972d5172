"""Doors for users of transformers, diffusers and lerobot."""
