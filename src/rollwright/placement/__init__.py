"""Where processes run: this machine, torchrun, Ray, Slurm."""
