"""What else a run can be: one part of a run of several processes, a service, a benchmark, or a replay."""
