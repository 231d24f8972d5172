"""Audio, video, motion and array files."""
