"""The web page over a run directory."""
