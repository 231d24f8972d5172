"""Jobs: from a config to a folder of media that survives what happens to it. ``run`` is the way in;
``ledger`` says what counts as done."""
