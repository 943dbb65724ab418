"""Runs: ``stages`` carries out a config's stages, ``loops`` trains, ``modes`` holds all other kinds of run, ``checks`` refuses early."""
