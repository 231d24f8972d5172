"""Image tokenizers."""
