"""Tables of ``gen ls``, a module per source; each is imported when its kind is asked for."""
