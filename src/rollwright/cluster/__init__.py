"""Where processes run: this machine, Ray, Slurm."""
