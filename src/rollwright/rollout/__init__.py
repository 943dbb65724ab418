"""Running many samples: the executor, staleness, failures, and the engines that users hold."""
