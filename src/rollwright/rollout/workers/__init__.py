"""Episodes in other processes: the controller that leases them, and the worker that runs them."""
