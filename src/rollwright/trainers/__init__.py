"""Runs: ``stages`` runs a config's stages, ``loops`` trains, ``modes`` has all other kinds of run, ``checks`` finds errors early."""
