"""`retrysafe completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import typer
import typer.completion as typers

from retrysafe.cli import options, output

# By which the shell asks the program itself; Click derives the same name from the program's.
VARIABLE: Final = "_RETRYSAFE_COMPLETE"


# What Typer has for its own options; it does not list the names.
_typers: Any = typers


def begin() -> None:
    """Lets this process answer a shell that asks what could come next, in Typer's own way."""
    _typers.completion_init()


class Shell(StrEnum):
    """The shells that completion is tested with."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@options.examples(
    "retrysafe completion bash > ~/.local/share/bash-completion/completions/retrysafe",
    "retrysafe completion zsh > ~/.zfunc/_retrysafe",
    "retrysafe completion fish > ~/.config/fish/completions/retrysafe.fish",
)
def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    as_json: options.AsJson = False,
) -> None:
    """Print the completion script of a shell; changes no file."""
    script = _typers.get_completion_script(
        prog_name="retrysafe", complete_var=VARIABLE, shell=shell.value
    )
    if options.is_json(context, as_json):
        output.write_json({"shell": shell.value, "script": script})
        return
    output.line(script)
