"""Motion tokenizers."""
