"""Modalities: what a prompt means, which frontend and models serve it, how media are saved, loaded
and checked."""
