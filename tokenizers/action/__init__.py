"""Action tokenizers."""
