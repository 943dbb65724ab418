"""Other kinds of run: one process of a run of several processes, a service, a benchmark, or a replay."""
