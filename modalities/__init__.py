"""Modalities: the meaning of prompts, the frontends and models that serve them, and the saving,
loading and checking of media.
"""
