"""Transfer of new weights to inference engines: publication, versions, files, shared memory and broadcast."""
