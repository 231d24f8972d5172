"""Audio codecs."""
