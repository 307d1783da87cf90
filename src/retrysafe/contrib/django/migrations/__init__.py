"""One Django migration per migration of retrysafe, with the same number and name."""
