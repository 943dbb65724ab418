"""The journal: what running episodes asked and were answered, written as it happens; the source of replay and recovery.

``records`` says what is in it, ``files`` writes and reads the files, ``episodes`` is the journal of one episode and what is read back
of it.
"""
