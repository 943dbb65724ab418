"""Child processes: how they start, what they say, and how they end.

``child`` starts a process that runs a module of ours, exchanges framed messages with it and kills it with all that it started
(``tree``). ``pool`` calls functions in such processes under time limits. ``ends_with_parent`` runs a command that ends with this process.
``supervisor`` restarts processes that are lost, wherever they run.
``sandbox`` runs Python that a model wrote; ``jails`` are where it runs, ``jail_server`` is inside them.
"""
