"""What a job keeps on disk: ledger, claims, manifest, shards, tokens, log."""
