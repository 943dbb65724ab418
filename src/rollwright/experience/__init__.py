"""What a sample produced: experiences, trajectories (check, normalise, pad, pack), the recorder, operators."""
