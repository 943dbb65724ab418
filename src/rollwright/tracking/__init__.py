"""How a run reports and stores its progress: metrics, sinks, live display, logs, traces and the run directory."""
