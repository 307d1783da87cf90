"""Stores: where records live. Each makes the core's decisions atomic and durable."""
