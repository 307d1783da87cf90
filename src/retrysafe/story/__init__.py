"""The demonstration: what retrysafe is for, on a real store with real threads and processes.

Nothing in it is staged. Every number that it shows is read from the store, from an answer that a
worker got, or from the ledger, which stands for the world outside.
"""
