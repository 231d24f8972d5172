"""Pages that are served to a browser on the same machine."""
