"""Constraints: regular languages over bytes and tokens, and the kinds that requests name.

``byte_dfa`` has automata over bytes, ``tokens`` turns them into automata over a vocabulary,
``canvas`` asks what may stand at the masked positions of a canvas, and ``build`` reads the
``structured`` of a request. ``kinds`` has one file per kind.
"""
