"""Small networks that draft, or that judge drafts, from the hidden states of a target."""

DRAFTER = "gen_drafter"  # model type of a trained drafter, which is no model of its own
