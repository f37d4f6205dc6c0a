"""The group of all commands: errors as one line, Ctrl-C, and a help page in parts."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from outblas.cli.command_table import commands, extras, parts
from outblas.cli.common import EXIT_ERROR, EXIT_INTERRUPT, command_line, errors
from outblas.core.errors import OutblasError, ToolchainMissing
from outblas.core.install_hint import install_hint, lab_hint
from outblas.core.lab_parts import COMMANDS, entry_points

#: typer's usage error, whether typer brings click along or depends on it.
_BadUsage: Any = typer.BadParameter.__base__
#: Failures of the machine rather than of the program: no space, quota, read-only, no permission.
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
#: Key of a context's data: the words of the command line behind ``outblas``.
_WORDS = "outblas: words"


class OutblasGroup(TyperGroup):
    """The group of all commands.

    A known error is one line on stderr, which begins with ``error:``, and exit status 2. Ctrl-C is exit status 130. No
    arguments print the help page.
    """

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the global options, with click's arguments and result. A wrong one prints one line and raises
        ``typer.Exit(2)``.
        """
        words = tuple(args[1] if len(args) > 1 else options["args"])  # parsing takes them from the list
        try:
            context = super().make_context(*args, **options)
        except _BadUsage as error:
            if _is_help(error):
                raise
            _fail(_usage_line(error))
        context.meta[_WORDS] = words
        return context

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name, and return its result.

        Raises:
            typer.Exit: 2 after a known error was printed, 130 after Ctrl-C. Other errors pass.

        SIGTERM and SIGHUP are answered as Ctrl-C; they end this process then.
        """
        with interrupted_by_signals():
            return self._invoke(ctx)

    def _invoke(self, ctx: Any) -> Any:
        """Run the command; turn its errors and Ctrl-C into lines on stderr and an exit status."""
        try:
            return super().invoke(ctx)
        except OutblasError as error:
            _fail(str(error))
        except _BadUsage as error:
            if _is_help(error):
                raise
            _fail(_usage_line(error))
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            extra = extras().get(package)
            if extra is None:
                raise
            _fail(f"{package} is not installed; expected it in this environment; {install_hint(extra)}")
        except OSError as error:
            if error.errno not in _MACHINE_ERRORS:
                raise
            where = f": {error.filename}" if error.filename else ""
            do = "free some space or pass another path"
            _fail(f"{error.strerror}{where}; expected a writable disk with free space; {do}")
        except MemoryError:
            kept = "what was recorded is kept; " if _is_resumable(ctx) else ""
            _fail(f"out of memory; {kept}expected more memory; raise the limit (ulimit -v), then repeat the command")
        except KeyboardInterrupt as error:
            kept, again = "nothing was kept", "run again with"
            if _is_resumable(ctx):
                kept, again = "what was recorded is kept", "resume with"
            errors.print(f"\n{str(error) or f'interrupted; {kept}'}\n{again}: {command_line()}", markup=False)
            raise typer.Exit(EXIT_INTERRUPT) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their parts, each with its summary."""
        for part in parts():
            with formatter.section(part.title):
                formatter.write_dl([(name, one.summary) for name, one in part.commands.items()], col_max=20)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in the order of the help page, ``doctor`` first."""
        return [name for name in commands() if name in self.commands]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Without outblas-lab, an unknown name says what to install."""
        if args and args[0] not in self.commands and not entry_points(COMMANDS):
            wrong = f"command {args[0]!r} does not exist without outblas-lab"
            raise ToolchainMissing(wrong, ", ".join(commands()), f"for more commands, run {lab_hint()}")
        return super().resolve_command(ctx, args)


def _is_resumable(context: Any) -> bool:
    """Return True if the running command keeps what it has recorded."""
    names = [word for word in context.meta.get(_WORDS, ()) if not word.startswith("-")][:2]
    command = commands().get(names[0]) if names else None
    return command is not None and bool({" ".join(names), *names[:1]}.intersection(command.resumable))


def _is_help(error: Any) -> bool:
    """Return True if no arguments were given: the error's text is the help page, which typer prints as it is."""
    if error.ctx is None:
        return False
    return " ".join(error.format_message().split()) == " ".join(error.ctx.get_help().split())


def _usage_line(error: Any) -> str:
    """Return the line on a wrong use. A global option behind the command is named with its place."""
    where = error.ctx.command_path if error.ctx is not None else "outblas"
    option = getattr(error, "option_name", None)
    if error.ctx is not None and error.ctx.parent is not None and option:
        root = error.ctx.find_root()
        if any(option in one.opts for one in root.command.params):
            behind = where.removeprefix(root.command_path)
            return f"{option} follows the command; put {option} before the command: outblas {option}{behind} ..."
    message = re.sub(r"Input should be a valid (\w+).*", r"expected a valid \1.", error.format_message(), flags=re.S)
    return f"{' '.join(message.split())} See `{where} --help`."


def _fail(message: str) -> NoReturn:
    errors.print("error: " + " ".join(message.split()), markup=False)
    raise typer.Exit(EXIT_ERROR)


def given_options(context: typer.Context, *names: str) -> dict[str, str]:
    """Return parameter -> option for those among ``names`` that the user gave, also where the value is the default.

    Example: of ``outblas tune --suite grid1000``, ``given_options(context, "suite", "layout")`` is
    ``{"suite": "--suite"}``.
    """
    found: dict[str, str] = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name != "DEFAULT":
            found[parameter.name] = max(parameter.opts, key=len)
    return found


#: Signals by which schedulers, ``timeout``, ``kill`` and a closed terminal end a program.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP within the ``with`` block into Ctrl-C; then end this process by the same signal.

    By default they end a process at once. Its programs in another session go on then, and its temporary folders stay.

    A signal with a handler is left alone, and so is one that is ignored (``nohup``). The second signal ends the process
    at once. On another thread than the main one, nothing happens.
    """
    taken: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _restore(taken)
        answer = signal.getsignal(signal.SIGINT)
        if callable(answer):  # Python's, or that of a loop of asyncio
            answer(number, frame)
        else:
            raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        _restore(taken)
        if received:
            _end_by(received[0])


def _restore(numbers: list[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def _end_by(number: int) -> None:
    """End this process by a signal, so that its parent sees why. Printed text is written out before."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            stream.flush()
    os.kill(os.getpid(), number)
