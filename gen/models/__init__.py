"""Models as samplers see them: protocols, adapters over transformers and diffusers classes, caches,
the zoo."""
