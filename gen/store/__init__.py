"""Files of a job on disk: ledger, claims, manifest, shards, tokens, log."""
