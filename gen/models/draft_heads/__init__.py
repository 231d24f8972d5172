"""Small networks that draft, or that judge drafts, from the hidden states of a target."""
