"""What frontends share."""
