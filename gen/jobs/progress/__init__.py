"""What a run reports while it works."""
