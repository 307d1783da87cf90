"""Measurements against a baseline in the same run; figures are ratios, machines are noisy."""
