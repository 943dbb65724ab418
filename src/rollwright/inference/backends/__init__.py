"""The inference backends: one file, or one package, for each kind of engine."""
