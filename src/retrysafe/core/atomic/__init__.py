"""Atomic mode: claim, business writes and outcome in the user's own transaction."""
