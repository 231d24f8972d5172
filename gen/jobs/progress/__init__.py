"""Progress reports of a run."""
