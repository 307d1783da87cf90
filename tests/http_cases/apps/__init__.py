"""The reference application, once for each protocol and framework, with the same routes."""
