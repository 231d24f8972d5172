"""What can be typed: one file per command with its flags. Nothing here imports what carries the
command out, so that help is quick."""
