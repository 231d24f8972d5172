"""Models behind the samplers' protocols: adapters of transformers and diffusers classes, KV caches
and the zoo."""
