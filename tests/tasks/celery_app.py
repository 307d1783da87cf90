"""A Celery application as users write it; the broker comes from the environment."""

from __future__ import annotations

import os

from celery import Celery, signals

from retrysafe import FOREVER, Idempotency
from retrysafe.contrib.celery import OnceTask, once
from tests.tasks import work

BROKER = os.environ.get("RETRYSAFE_TEST_BROKER", "")
app = Celery(
    "shop",
    broker=BROKER,
    backend=os.environ.get("RETRYSAFE_TEST_BACKEND"),
)
app.conf.update(
    task_default_queue=os.environ.get("RETRYSAFE_TEST_QUEUE", "celery"),
    broker_transport_options={
        "visibility_timeout": 2,
        "polling_interval": 0.1,
        # A worker that is killed while it looks for lost messages keeps all others from it so long.
        "unacked_mutex_expire": 2,
        **({"region": "eu-central-1", "wait_time_seconds": 1} if BROKER.startswith("sqs") else {}),
    },
    # SQS has no way to send one message to all workers.
    worker_enable_remote_control=not BROKER.startswith("sqs"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    redis_backend_health_check_interval=0,
)
idem = Idempotency(work.STORE, caller="shop", policy=work.POLICY)


class Once(OnceTask):
    idempotency = idem


# Not shared: other applications of a test run would get them too.
OWN = {"shared": False}
LATE = {**OWN, "acks_late": True, "reject_on_worker_lost": True}


@app.task(base=Once, **OWN)
def charge(name, seconds=0.0, wish=None):
    return work.do(name, seconds, wish)


@app.task(**LATE)
@once(idem, key=("name",), window=FOREVER)
def charge_named(name):
    return work.do(name)


@app.task(bind=True, **LATE)
@once(idem)
def bound(self, name):
    work.note("id", self.request.id)
    return work.do(name)


@app.task(autoretry_for=(LookupError,), retry_kwargs={"countdown": 0.1, "max_retries": 2}, **LATE)
@once(idem)
def flaky(name, tries):
    work.fail_until(name, tries)


@app.task(bind=True, base=Once, max_retries=2, **OWN)
def retries_itself(self, name, tries):
    try:
        work.fail_until(name, tries)
    except LookupError as error:
        raise self.retry(exc=error, countdown=0.1) from None


@app.task(**LATE)
@once(idem, transaction=work.transaction)
def place(name, wish=None, *, attempt=None):
    work.order(attempt.connection, name, wish)


@app.task(**LATE)
@once(idem)
def calls_another(name):
    bound.run(name + " by bound")
    work.do(name)


@app.task(base=Once, **OWN)
def calls_itself(name, times):
    work.do(f"{name} {times}")
    if times:
        calls_itself(name, times - 1)


@app.task(**OWN)
def total(results):
    work.note("total", ",".join(sorted(each["name"] for each in results)))


@signals.task_postrun.connect
def hang_before_ack(kwargs=None, **_):
    work.hang("ack", kwargs.get("name"), kwargs.get("wish"))
