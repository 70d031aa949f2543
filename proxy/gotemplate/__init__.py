"""Go's text/template language, bounded, for the TEMPLATEs of models."""
