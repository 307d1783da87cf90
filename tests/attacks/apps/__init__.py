"""Small protected applications that the tests put behind real servers."""
