"""The gallery of a job folder: a page to look at its media with (``gen.gallery.write``)."""
