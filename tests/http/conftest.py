"""Both middlewares behind one interface, so that one test holds for both."""

import asyncio

import pytest

from tests.http.driving import AsgiSubject, WsgiSubject, new_store


@pytest.fixture(params=["asgi", "wsgi"])
def make_subject(request):
    """Makes a shop behind the middleware of either world; closed when the test ends."""
    made = []
    with asyncio.Runner() as runner:

        def make(store=None, **options):
            store = store or new_store()
            subject = (
                AsgiSubject(runner, store, **options)
                if request.param == "asgi"
                else WsgiSubject(store, **options)
            )
            made.append(subject)
            return subject

        yield make
        for subject in made:
            subject.close()
