"""Samplers of models of graphs."""
