"""Networks seen through the model protocols, caches, conditions."""
