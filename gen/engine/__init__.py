"""Engine that serves the requests of many callers from shared batches."""
