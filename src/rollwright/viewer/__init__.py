"""The viewer: reads a run's journal, metrics and config while it trains, after a crash, or from a copy.

``run`` answers queries about one run, ``runs`` lists runs, ``index`` is the database derived from the journal. ``server`` and its pages
show runs in a browser, ``terminal`` on a terminal; both get a sample's content from ``sample_view``. The viewer writes only the index,
and does not load torch.
"""
