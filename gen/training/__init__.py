"""Data and models of one's own: media to token shards, and training on them."""
