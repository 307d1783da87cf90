"""The demo: a small shop behind HTTP whose every POST may be sent twice. Copy from it.

`app` is the API, `ledger` is the shop's own table, `serving` starts the server.
"""
