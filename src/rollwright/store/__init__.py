"""The experience store: groups of experiences wait here between the processes that sample them and the one that trains on them."""
