"""Django: protected views, and retrysafe's schema as an application of the project.

`decorators.idempotent` stands next to a view, `middleware.RetrysafeMiddleware` protects paths; both
are set up by the setting `RETRYSAFE`. Views need nothing in INSTALLED_APPS.
The setting's store may be a database of the project, by its alias: `databases`.

With `retrysafe.contrib.django` in INSTALLED_APPS, `manage.py migrate` applies the same SQL as
`retrysafe migrate`, and notes it in the same place. The schema is named by the setting
`RETRYSAFE_SCHEMA`; `retrysafe` is the default.
"""

from retrysafe.extras import missing_extra

try:
    import django as _django  # noqa: F401 — only whether it is there.
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "django", error) from error
