"""The table of HTTP cases, and what plays it against real servers."""
