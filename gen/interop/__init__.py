"""Interfaces for users of transformers, diffusers and lerobot."""
