"""Gallery of a job folder: a page that shows its outputs (``gen.gallery.write``)."""
