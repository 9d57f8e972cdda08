"""Ends the script that imports this with a sentence where its Python is too old for hvdlite, as python3 of RHEL 8 is.

A script in which Python 3.6 comes as far as here has nothing newer before it, `__future__.annotations` least of all.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (it is for what pyproject.toml excludes)
    version = sys.version.split()[0]
    sys.exit(
        f"{sys.argv[0]}: hvdlite needs Python 3.10 or newer, and this is {version} ({sys.executable}): run the same "
        "command with a newer one, as in python3.12 " + " ".join(sys.argv)
    )
