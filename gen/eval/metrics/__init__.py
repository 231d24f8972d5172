"""Metrics, one file each: ``@register("metric", name)`` on a class is all that adding one takes."""
