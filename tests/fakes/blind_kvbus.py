"""A `kvbus` that cannot read the memory in slot files, as with an engine to come."""

import sys

from proxy.cli import main
from proxy.errors import StateFormatError
from proxy.llamacpp import state


def _read_memory(*_args: object, **_kwargs: object) -> None:
    raise StateFormatError("a section of a kind that nobody knows")


if __name__ == "__main__":
    setattr(state, "read_memory", _read_memory)  # noqa: B010 - it is not exported
    sys.exit(main())
