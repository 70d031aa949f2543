"""Which KVBUS_* variables of the environment mean nothing to kvbus.

A misspelt one would be passed over in silence: environments hold what others put
there, so it is told, not refused. What Kubernetes sets in pods beside a Service called
`kvbus` (KVBUS_SERVICE_HOST, KVBUS_PORT_..._TCP, ...) is no mistake.
"""

import difflib
import re
from collections.abc import Mapping

from proxy.config import SETTINGS

_PREFIX = "KVBUS_"
_OF_A_SERVICE = re.compile(r"KVBUS_(SERVICE_(HOST|PORT)|PORT(?=_\d|$))\w*")


def unknown_variables(environment: Mapping[str, str]) -> str:
    """Return one line that names what is unknown, with near names; "" if nothing is."""
    known = ["KVBUS_CONFIG", *(setting.variable for setting in SETTINGS)]
    found: list[str] = []
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known:
            continue
        if _OF_A_SERVICE.fullmatch(name):
            continue
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.75)
        found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"no such setting, ignored: {', '.join(found)}" if found else ""
