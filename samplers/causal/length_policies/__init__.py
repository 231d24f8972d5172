"""Length policies: how many tokens a draft model drafts in a round."""
