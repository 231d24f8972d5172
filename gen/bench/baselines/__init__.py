"""Other implementations beside gen's samplers."""
