"""The demo: a small shop behind HTTP whose every POST may be sent twice.

It is an example to copy from: `app` puts the parts together, `charges`, `orders` and `checkouts`
are three ways to run an operation once, `ledger` is the database, `serving` starts a server. The
ledger has one entry for every execution, so a request that was carried out twice would show.
"""
