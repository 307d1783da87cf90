"""What people can do: release and expire keys, retry and discard outbox entries.

Every action is asked about once and needs a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final
from urllib.parse import urlencode

from retrysafe.core.listing import RecordQuery
from retrysafe.core.machine import decide, operator_trigger
from retrysafe.core.model import (
    Condition,
    Decision,
    OperatorCommand,
    OperatorNote,
    Seen,
    StoredKey,
)
from retrysafe.core.outbox.entries import EntryCommand
from retrysafe.core.outbox.port import outbox_of
from retrysafe.core.ports import Store
from retrysafe.core.recovery import key_of as key_in
from retrysafe.dashboard.pages import BULK, FILTERS, key_of, query_of
from retrysafe.dashboard.web import BadRequest
from retrysafe.runtime.checks import operator_outcome
from retrysafe.runtime.drive import run_sync

REASON_LIMIT_CHARACTERS: Final = 500
# As many as one request changes; the next one goes on.
BULK_LIMIT: Final = 500
CONSEQUENCES: Final = {
    OperatorCommand.RELEASE: "The next use of the key runs the operation again.",
    OperatorCommand.FORCE_RELEASE: (
        "Whoever holds the claim loses it, and the operation may take place twice. "
        "Be sure that its owner is gone."
    ),
    OperatorCommand.EXPIRE: "The next use of the key runs the operation again.",
}


@dataclass(frozen=True, slots=True)
class Done:
    """Where to go after an action, or what to ask before it."""

    target: str = "/"
    confirm: dict[str, Any] | None = None


Action = Callable[[dict[str, str], str], Done]


class Actions:
    """What can be done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._actions: dict[str, Action] = {
            "/key": self.operate,
            "/keys": self.operate_on_all,
            "/outbox": self.operate_entry,
        }

    def find(self, path: str) -> Action | None:
        """The action at a path below the mount."""
        return self._actions.get(path)

    def operate(self, form: dict[str, str], user: str) -> Done:
        """Releases or expires one key; raises `OperatorRefused`."""
        key = key_of(form)
        command = _chosen(OperatorCommand, form)
        if not form.get("is_confirmed"):
            stored = run_sync(self._store.read(key))
            fields = {"key": key.text, "caller": key.caller, "command": command.value}
            found = "not there" if stored is None else stored.condition.value
            if stored is not None:
                fields["seen"] = f"{stored.record.token.hex()} {found}"
            return Done(
                confirm={
                    "what": f"{command.value.capitalize()} {key}, which is {found}",
                    "consequence": CONSEQUENCES[command],
                    "fields": fields,
                    "action": "/key",
                    "back": "/key?" + urlencode({"key": key.text, "caller": key.caller}),
                }
            )
        note = OperatorNote(user, _reason(form), _seen(form))
        decision = run_sync(self._store.operate(key, command, note))
        operator_outcome(decision, command, key, run_sync(self._store.read(key)))
        return Done("/key?" + urlencode({"key": key.text, "caller": key.caller}))

    def operate_on_all(self, form: dict[str, str], user: str) -> Done:
        """Releases or expires all that match, at most as many as somebody has agreed to."""
        command = _chosen(OperatorCommand, form)
        if command not in BULK:
            raise BadRequest("this command is for one key at a time")
        asked = {name: form.get(name, "") for name in FILTERS if form.get(name)}
        if not asked:
            raise BadRequest("say which keys: all of them is never what you want")
        query = query_of(asked)
        takes = frozenset(item for item in Condition if _applies(command, item))
        query.conditions = query.conditions & takes if query.conditions else takes
        back = "/keys?" + urlencode(asked)
        matching = list(islice(self._matching(query), BULK_LIMIT)) if query.conditions else []
        if not matching:
            raise BadRequest(f"nothing that matches takes this command: {command.value}")
        if not form.get("is_confirmed"):
            first = ", ".join(str(key_in(item.record)) for item in matching[:3])
            return Done(
                confirm={
                    "what": f"{command.value.capitalize()} {len(matching)} keys",
                    "consequence": f"{CONSEQUENCES[command]} The first are {first}. One go takes "
                    f"{BULK_LIMIT} at most.",
                    "fields": asked
                    | {"command": command.value, "count": str(len(matching))}
                    | {"looked_at_ms": str(matching[0].now_ms)},
                    "action": "/keys",
                    "back": back,
                }
            )
        note = OperatorNote(user, _reason(form))
        agreed, looked_at_ms = _number(form, "count"), _number(form, "looked_at_ms")
        # What matches only now is nothing that anybody has agreed to.
        matching = [item for item in matching if item.was_so(looked_at_ms)]
        for item in matching[:agreed]:
            # Each is decided once more by the store: one that has changed meanwhile is left.
            noted = replace(note, seen=item.seen)
            run_sync(self._store.operate(key_in(item.record), command, noted))
        return Done(back)

    def _matching(self, query: RecordQuery) -> Iterator[StoredKey]:
        while True:
            page = run_sync(self._store.list_records(query))
            yield from page.keys
            if page.after is None:
                return
            query.after = page.after

    def operate_entry(self, form: dict[str, str], user: str) -> Done:
        """Retries or discards one entry of the outbox."""
        command = _chosen(EntryCommand, form)
        text = form.get("id", "")
        # Eighteen digits, because nineteen may be more than a store's number can be.
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadRequest("an entry is named by its number")
        number = int(text)
        back = "/outbox?" + urlencode({"condition": form.get("condition", "dead")})
        if not form.get("is_confirmed"):
            fields = {
                "id": str(number),
                "command": command.value,
                "condition": form.get("condition", "dead"),
            }
            return Done(
                confirm={
                    "what": f"{command.value.capitalize()} entry {number}",
                    "consequence": "It is delivered again at once."
                    if command is EntryCommand.RETRY
                    else "It is never delivered.",
                    "fields": fields,
                    "action": "/outbox",
                    "back": back,
                }
            )
        _reason(form)
        run_sync(outbox_of(self._store).operate(number, command))
        return Done(back)


def _applies(command: OperatorCommand, condition: Condition) -> bool:
    is_stored = condition is not Condition.ABSENT
    return is_stored and decide(operator_trigger(command), condition) is Decision.APPLY


def _chosen(commands: Any, form: dict[str, str]) -> Any:
    try:
        return commands(form.get("command", ""))
    except ValueError:
        raise BadRequest("there is no such command") from None


def _number(form: dict[str, str], name: str) -> int:
    text = form.get(name, "")[:15]
    if not (text.isascii() and text.isdigit()):
        raise BadRequest(f"nobody has agreed to this: the form has no {name}")
    return int(text)


def _seen(form: dict[str, str]) -> Seen | None:
    """What was shown with the question that this is the answer to."""
    text = form.get("seen", "")
    if not text:
        return None  # A script that did not look.
    token, _, condition = text.partition(" ")
    try:
        return Seen(bytes.fromhex(token), Condition(condition))
    except ValueError:
        raise BadRequest("load the page again: the form says nothing of the key") from None


def _reason(form: dict[str, str]) -> str:
    reason = " ".join(form.get("reason", "").split())
    if not reason:
        raise BadRequest("say why: the reason is kept, and somebody will want to know it")
    return reason[:REASON_LIMIT_CHARACTERS]
