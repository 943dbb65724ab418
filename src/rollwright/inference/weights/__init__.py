"""New weights on their way to inference engines: the ways there are, files, the distributed group, publication."""
