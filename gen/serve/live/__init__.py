"""The page at ``/``, which shows models decode."""
