"""Video tokenizers."""
