"""Samplers of continuous latents."""
