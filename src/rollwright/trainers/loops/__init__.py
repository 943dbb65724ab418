"""The training loops: the loop that all trainers share, and one file for each kind of step (RL, SFT and DPO)."""
