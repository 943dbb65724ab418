"""Fault injection: runs that are killed, stopped and damaged at random points, and the proof that they lost and repeated nothing.

::

    python -m tests.faults --kills 200 --seed 1 --topology both-sync --json report.json

``topologies`` names what is run (``run`` carries it out; ``both``, ``ranks``, ``explore_train``, ``serve`` and ``long_episodes`` say
what has to hold), ``plan`` what happens to it and when, ``parts`` starts and ends processes, ``proxy`` stands in their connections,
``proof`` reads journals, store and metrics, ``left`` looks for what was left behind.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:  # the modules that all tests share
    sys.path.insert(0, str(TESTS))
