"""The outbox: entries that are stored with an outcome and delivered after it."""
