"""What a run says about itself: metrics with scopes, sinks, live progress, logs, traces and the run directory."""
