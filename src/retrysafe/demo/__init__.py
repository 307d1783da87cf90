"""The demo: a small shop behind HTTP whose every POST may be sent twice. Copy from it.

`app` is the API, `ledger` the shop's own table, `messages` a consumer. `retrysafe demo` serves it.
"""
