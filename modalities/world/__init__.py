"""Playable board: an agent, walls and a box, seen as small frames and moved by actions."""
