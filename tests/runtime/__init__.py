"""The faces on real threads and real event loops."""
