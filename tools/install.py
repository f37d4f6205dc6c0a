"""Install packages as pip would, with uv where that can be had, which takes a third of the time.

    python tools/install.py [--python OTHER] --editable '.[dev]' PACKAGE ...

uv reads none of pip's settings; the indexes, folders of wheels, constraints and certificates of pip go to it from here.
Where uv is missing or fails, pip installs the same, and what pip says counts.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: Setting of pip -> variable of uv, and what stands between several values there.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
#: pip's groups of settings that concern an installation; a later one counts more.
GROUPS = ("global", "install", ":env:")


def passed_on(listed: str) -> dict[str, str]:
    """Return variables for uv that stand for pip's settings.

    Args:
        listed: output of ``pip config list``, e.g. "global.index-url='https://mirror/simple'".
    """
    found: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        group, _, setting = name.rpartition(".")
        if equals and group in found and setting in SETTINGS:
            found[group][setting] = str(ast.literal_eval(value))
    settings = {setting: value for group in GROUPS for setting, value in found[group].items()}
    # pip takes the best release of all indexes, uv that of the first index that has any.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | {
        SETTINGS[setting][0]: SETTINGS[setting][1].join(value.split()) for setting, value in settings.items()
    }


def command_of_uv(python: str, wanted: Sequence[str]) -> list[str]:
    """Return the command by which uv installs what is wanted for an interpreter."""
    return [sys.executable, "-m", "uv", "pip", "install", "--python", python, "--quiet", *wanted]


def command_of_pip(python: str, wanted: Sequence[str]) -> list[str]:
    """Return the command by which pip does."""
    options = ["--disable-pip-version-check", "--quiet", "--no-compile"]
    return [sys.executable, "-m", "pip", "--python", python, "install", *options, *wanted]


def install(python: str, wanted: Sequence[str], environment: Mapping[str, str]) -> int:
    """Install what is wanted, by uv or else by pip; return the exit status.

    Args:
        python: path of the interpreter.
        wanted: packages and options that both installers have.
        environment: variables; those of uv that are set already stay.
    """
    pip = [sys.executable, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, env=environment)
    variables = passed_on(listed.stdout) | environment
    uv = subprocess.run(command_of_uv(python, wanted), env=variables, capture_output=True, text=True)
    if not uv.returncode:
        return 0
    print(f"note: pip installs, since uv did not: {(uv.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return subprocess.run(command_of_pip(python, wanted), env=environment).returncode


def main(arguments: Sequence[str]) -> int:
    python, wanted = sys.executable, list(arguments)
    if wanted[:1] == ["--python"]:
        _, python, *wanted = wanted
    return install(python, wanted, os.environ)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
