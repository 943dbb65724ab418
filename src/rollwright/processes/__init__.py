"""Child processes: their start, communication and end.

``child`` starts a process that runs a module of this package, exchanges framed messages with it, and kills it with its descendants
(``tree``). ``pool`` calls functions in such processes under time limits. ``ends_with_parent`` runs a command that ends with this process.
``supervisor`` restarts lost processes, on any machine.
``sandbox`` runs Python code written by a model in ``jails``; ``jail_server`` runs inside a jail. ``boxes`` make an agent's machine, a
``box``; ``box_server`` runs inside one. What both have in common is in ``inside``, ``bubblewrap`` and ``containers``.
"""
