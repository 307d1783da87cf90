"""A Django project that keeps its keys in its own database, and tests itself."""
