"""What the job layer costs."""
