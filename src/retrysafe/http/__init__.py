"""HTTP: any ASGI or WSGI application, protected by one set of rules."""
