"""Configs: files, layers, sweeps and overrides, merged strictly, and the ``Job`` they come to
(``gen.config.job``)."""
