"""Base classes of frontends."""
