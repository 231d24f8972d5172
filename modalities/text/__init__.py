"""Text of a synthetic dataset of tasks."""
