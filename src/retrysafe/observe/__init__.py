"""Listeners for what the engine reports."""
