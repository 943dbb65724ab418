"""The journal of running episodes: each model request, tool result and outcome, written as it happens; the source of replay and recovery.

``records`` defines what is in it, ``writing`` appends to it, ``reading`` reads its files, ``episodes`` puts the episodes together again.
"""
