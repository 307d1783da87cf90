"""Body keys: what says that the call or the request itself makes its key.

Owns the window of such keys and the name of what tells two equal intents apart. It must not know
functions or requests: those who make the keys read the name in their own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from retrysafe.core.keys.key import checked_secret
from retrysafe.core.policy import Policy
from retrysafe.errors import PolicyInvalid


@dataclass(frozen=True, slots=True)
class BodyKey:
    """A keyed hash of the whole call or request, for those that cannot bring a key.

    Equal ones of one caller within the window count as one; the window starts when the first one
    ends. Needs a secret. Fields that the fingerprint leaves out do not count here, either, so a
    change of the fingerprint is a change of the keys.

    `intent` names what tells two equal ones apart, and counts whatever the fingerprint leaves out.
    For `once` it is a parameter. Over HTTP it is a field of the body such as `/intent`, which may
    have a type as in `FieldsKey` (`/intent:text`), or a header such as `X-Order-Number`. A call
    whose intent is None, or a request without it, has the key that it would have anyway. Raises
    `PolicyInvalid` for what is no name.
    """

    window: timedelta = timedelta(minutes=5)
    intent: str | None = None

    def __post_init__(self) -> None:
        given: object = self.intent
        if given is not None and not (isinstance(given, str) and given):
            raise PolicyInvalid(
                "the intent of BodyKey is the name of a parameter, or over HTTP a field such as "
                f"/intent or a header such as X-Order-Number, got {given!r}"
            )

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy with this window; raises `PolicyInvalid` or `SecretMissing`."""
        checked_secret(secret)
        return policy.with_window(self.window, of="a BodyKey")
