"""Random texts of automata over bytes."""

from __future__ import annotations

import random

import numpy as np

from gen.constraints.byte_dfa import ByteDFA, distances


def random_text(dfa: ByteDFA, rng: random.Random, most: int = 200, ends: float = 0.1) -> bytes:
    """Return an accepted text: each step goes to one of the next states at random.

    After ``most`` bytes it takes a shortest way to an end. ``ends``: probability of ending where
    the text may.
    """
    distance = distances(dfa.next, dfa.accepting)
    state, text = 0, bytearray()
    while True:
        after = dfa.next[state][dfa.byte_class]
        options = np.flatnonzero(after >= 0)
        is_long = len(text) >= most
        if dfa.accepting[state] and (not len(options) or is_long or rng.random() < ends):
            return bytes(text)
        if is_long:
            left = distance[after[options]]
            options = options[left == left.min()]
        by_state: dict[int, list[int]] = {}
        for byte in options.tolist():
            by_state.setdefault(int(after[byte]), []).append(byte)
        state = rng.choice(sorted(by_state))
        text.append(rng.choice(by_state[state]))


def near(text: bytes, rng: random.Random) -> bytes:
    """Return a text with one byte changed, left out or put in."""
    i = rng.randrange(len(text))
    change = rng.choice(("change", "drop", "insert"))
    byte = bytes([rng.choice(b'0123456789"{}[],:.-aeZ ')])
    return text[:i] + (b"" if change == "drop" else byte) + text[i + (change != "insert") :]
