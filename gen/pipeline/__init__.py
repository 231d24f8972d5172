"""Pipeline from prompts to outputs: request, decoding, outputs, streaming."""
