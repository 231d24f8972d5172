"""Decoding methods and their interchangeable parts. They know models only through targets
(``gen.models.targets.base``)."""
