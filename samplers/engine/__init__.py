"""The loops that all samplers share."""
