"""Commands with their flags, one file each. Nothing here imports the implementations, so that
help is quick."""
