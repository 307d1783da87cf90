"""The dashboard: what runs, what is stuck, what failed, and the buttons that mend it.

`Dashboard` is the door. `web` has requests, responses and the ASGI and WSGI doors, `access` says
who may look and who may act, `pages` and `actions` are what people see and do, `views` turns
records into what templates show.
"""

from retrysafe.dashboard.app import Dashboard

__all__ = ["Dashboard"]
