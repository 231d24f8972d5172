"""Benchmark of the job layer."""
