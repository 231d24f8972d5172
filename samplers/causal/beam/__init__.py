"""Causal decoders that search or follow a rule, without drafts."""
