"""Text tokenizers."""
