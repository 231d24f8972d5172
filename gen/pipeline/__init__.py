"""From prompts to media: request, decoding, outputs, streaming."""
