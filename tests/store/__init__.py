"""The store, on every database and driver that it has a back end for."""
