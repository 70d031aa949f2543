"""What is read of the process behind a llama-server that runs already."""

import os
import subprocess
import sys

from proxy.llamacpp.attached import find_process

LISTEN = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
    " print(s.getsockname()[1], flush=True); sys.stdin.read()"
)


def test_variables_that_change_kv_count_as_flags() -> None:
    """Those that act like flags are among them, and the one that turns rotation off."""
    variables = {"LLAMA_ARG_YARN_ORIG_CTX": "5", "LLAMA_ATTN_ROT_DISABLE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, "--port", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables | {"LLAMA_OTHER": "2"},
    ) as process:
        assert process.stdout is not None
        found = find_process(f"http://127.0.0.1:{process.stdout.readline().strip()}")
        assert found is not None
        assert found.pid == process.pid
        process.communicate()
    assert found.environment == (
        "LLAMA_ARG_YARN_ORIG_CTX=5",
        "LLAMA_ATTN_ROT_DISABLE=1",
    )
    assert set(found.environment) <= set(found.flags)
