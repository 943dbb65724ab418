"""What people see of a run: its journal, metrics and config, read while it is written, after a crash, or from a copy.

``run`` answers questions about one run, ``runs`` lists them, ``index`` is the database that is derived from the journal. Nothing here
writes to a run but that index, and nothing loads torch.
"""
