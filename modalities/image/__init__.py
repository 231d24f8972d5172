"""Images of captioned shapes."""
