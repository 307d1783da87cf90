"""retrysafe's schema as a Django application: add `retrysafe.contrib.django` to INSTALLED_APPS.

`manage.py migrate` then applies the same SQL as `retrysafe migrate`, and notes it in the same
place. The schema is named by the setting `RETRYSAFE_SCHEMA`; `retrysafe` is the default.
"""
