"""Shapes of drafts: which nodes of a tree get children."""
