"""A runner of our own: llama-server's HTTP server, out of the xllamacpp wheel.

``python -m proxy.llamacpp.server --model M.gguf --host /run/x.sock ...`` takes the
flags of llama-server that kvbus needs. It is two processes: the *engine*, which loads
the model and serves, and a small *guard* in front of it, whose pid the caller knows.

Rules:
1. One JSON line on stdout, ``{"ready": true, "address": ..., "engine": ...,
   "vram_bytes": ...}``, when the model answers; nothing else goes there.
2. SIGTERM, SIGINT, or the end of the pipe ``--parent-fd`` (the caller died, however it
   died) end the engine at once, remove the socket, the slot files named kvbus-* and
   their directory if that leaves it empty, and give exit code 0.
3. Where the engine ends by itself, the guard ends the same way (exit code or signal)
   and removes the socket only: the caller lives and owns the slot files.
4. What the caller got wrong (no such model, no xllamacpp) is exit code 1 and one clear
   last line on stderr.
5. No prompt text is logged, and no core is dumped: both would hold prompts. Once it
   serves the engine's stderr goes nowhere, for it prints what clients send there:
   grammars and schemas that it refuses.

The engine holds the interpreter's lock for as long as it loads, minutes for a large
model. Neither a signal handler nor a thread of that process would run meanwhile;
hence the guard.
"""

import argparse
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from proxy.errors import ConfigError

SLOT_FILE_PREFIX = "kvbus-"

_GGUF_MAGIC = b"GGUF"
_MAX_SOCKET_PATH_BYTES = 107  # sun_path, with its closing zero
_LISTENER_END_SECONDS = 2.0  # a killed engine with much memory takes a while to go
_PR_SET_PDEATHSIG = 1
_LOG_ERRORS = 1
_CPU_BATCH_TOKENS = 128
"""The engine hears of a client's leaving between two batches. Its own 2,048 tokens
are many seconds of a CPU's work; smaller ones cost a CPU nothing (measured at 64 to
2,048 tokens: no difference beyond the noise)."""
_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class _Sampling(NamedTuple):
    """A default of sampling, for requests that do not say."""

    flag: str
    kind: type[int] | type[float]
    name: str
    """In the engine's parameters."""
    is_given_bit: int
    """Tells the engine that a value which the model's file recommends does not count
    (llama.cpp, common/common.h: common_params_sampling_config)."""


_SAMPLING = (
    _Sampling("--temp", float, "temp", 1 << 6),
    _Sampling("--top-p", float, "top_p", 1 << 2),
    _Sampling("--top-k", int, "top_k", 1 << 1),
    _Sampling("--min-p", float, "min_p", 1 << 3),
    _Sampling("--repeat-penalty", float, "penalty_repeat", 1 << 8),
)
_POOLING = ("none", "mean", "cls", "last", "rank")
_FLASH_ATTENTION = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}


def build_parser() -> argparse.ArgumentParser:
    """Describe the flags; those of llama-server keep its names and meaning."""
    parser = argparse.ArgumentParser(prog="python -m proxy.llamacpp.server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--alias")
    parser.add_argument(
        "--host", default="127.0.0.1", help="an address, or a path ending in .sock"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--ctx-size", type=int, required=True, help="of all slots")
    parser.add_argument("--parallel", type=int, default=1, help="number of slots")
    parser.add_argument("--slot-save-path", type=Path)
    parser.add_argument("--cache-type-k", choices=_KV_TYPES, default="f16")
    parser.add_argument("--cache-type-v", choices=_KV_TYPES, default="f16")
    parser.add_argument("--flash-attn", choices=_FLASH_ATTENTION, default="auto")
    parser.add_argument("--cache-ram", type=int, default=8192, metavar="MIB")
    parser.add_argument("--threads", type=int, default=-1)
    parser.add_argument("--batch-size", type=int, metavar="N")
    parser.add_argument("--ubatch-size", type=int, metavar="N")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pooling", choices=_POOLING, help="default: the model's own")
    for sampling in _SAMPLING:
        parser.add_argument(sampling.flag, type=sampling.kind, metavar="N")
    parser.add_argument("--mmproj", type=Path, help="projector, for images")
    parser.add_argument("--context-shift", action="store_true")
    parser.add_argument("--n-predict", type=int, default=-1, help="at most, a reply")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--parent-fd", type=int, help="read end of the caller's pipe")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the guard, and under it the engine."""
    options = build_parser().parse_args(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)  # slot files and the socket hold or lead to prompts
    try:
        _check(options)
    except ConfigError as error:
        print(f"runner: {error}", file=sys.stderr)
        return 1
    return _guard(options)


def _check(options: argparse.Namespace) -> None:
    """Refuse early, in words of our own, what the engine would refuse in its own."""
    _check_gguf("model", options.model)
    if options.mmproj is not None:
        _check_gguf("projector", options.mmproj)
    if options.slot_save_path:
        try:
            options.slot_save_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"slot directory: {error}") from error
    path = _socket_path(options)
    if path is None:
        return
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path {path} is too long for a unix socket")
    deadline = time.monotonic() + _LISTENER_END_SECONDS
    while _is_listened_on(path):
        if time.monotonic() > deadline:
            raise ConfigError(f"socket {path} is in use")
        time.sleep(0.02)
    path.unlink(missing_ok=True)  # left over by a process that was killed


def _check_gguf(what: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise ConfigError(f"{what} {path}: not a GGUF file")


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise ConfigError(f"socket {path}: {error.strerror}") from error
    return True


def _socket_path(options: argparse.Namespace) -> Path | None:
    host: str = options.host
    return Path(host).absolute() if host.endswith(".sock") else None


# -- the guard --------------------------------------------------------------------


def _guard(options: argparse.Namespace) -> int:
    """Start the engine; wait until it ends or has to; clean up (rules 2 and 3)."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda number, _frame: caught.append(number))
    guard_pid = os.getpid()
    engine_pid = os.fork()
    if not engine_pid:
        _become_engine(options, guard_pid)
    watched = [wake_read]
    if options.parent_fd is not None:
        watched.append(options.parent_fd)
    while True:
        readable, _, _ = select.select(watched, [], [])
        if wake_read in readable:
            os.read(wake_read, 64)
        has_parent = options.parent_fd not in readable or os.read(options.parent_fd, 64)
        ended, status = os.waitpid(engine_pid, os.WNOHANG)
        if ended:
            _clean_up(options, removes_slot_files=not has_parent)
            return _end_like(status)
        if {signal.SIGTERM, signal.SIGINT} & set(caught) or not has_parent:
            os.kill(engine_pid, signal.SIGKILL)
            os.waitpid(engine_pid, 0)
            _clean_up(options, removes_slot_files=True)
            return 0


def _end_like(status: int) -> int:
    """End by the signal that ended the engine, or give its exit code."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


def _clean_up(options: argparse.Namespace, *, removes_slot_files: bool) -> None:
    path = _socket_path(options)
    if path is not None:
        path.unlink(missing_ok=True)
    if not removes_slot_files or not options.slot_save_path:
        return
    try:
        for slot_file in options.slot_save_path.glob(f"{SLOT_FILE_PREFIX}*"):
            slot_file.unlink(missing_ok=True)
        options.slot_save_path.rmdir()
    except OSError:
        return  # others' files are in it, or it is gone


# -- the engine -------------------------------------------------------------------


def _become_engine(options: argparse.Namespace, guard_pid: int) -> NoReturn:
    """Serve until killed. Ends without the engine's own teardown: that may hang."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both
    _die_with(guard_pid)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # no debugger prints our memory
    code = 1
    try:
        _server, ready = _load(options)
        _say_no_more()
        print(json.dumps({"ready": True, **ready}), flush=True)
        threading.Event().wait()
    except ConfigError as error:
        print(f"runner: {error}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        code = 0  # nobody waits for us to be ready
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _say_no_more() -> None:
    """Let nothing that the engine prints from now on reach a file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _die_with(guard_pid: int) -> None:
    """End as soon as the guard does, even where it was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != guard_pid:
            os._exit(1)


def _load(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Load the model; give the running server and what to say of it."""
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigError(
            f"no engine to run models with ({error}): install kvbus[embedded]"
        ) from error
    params = xllamacpp.CommonParams()
    _apply(options, params, xllamacpp)
    free_bytes = _free_device_bytes(xllamacpp)
    try:
        server = xllamacpp.Server(params)
    except Exception as error:
        raise ConfigError(
            f"model {options.model}: the engine could not load it"
        ) from error
    return server, {
        "address": server.listening_address,
        "engine": f"xllamacpp {metadata.version('xllamacpp')}",
        "vram_bytes": max(0, free_bytes - _free_device_bytes(xllamacpp)),
    }


def _apply(options: argparse.Namespace, params: Any, xllamacpp: Any) -> None:  # noqa: ANN401
    params.model.path = str(options.model)
    params.model_alias = {options.alias or options.model.stem}
    path = _socket_path(options)
    params.hostnames = [str(path or options.host)]
    params.port = options.port
    params.n_ctx = options.ctx_size
    params.n_parallel = options.parallel
    if options.slot_save_path:
        # the engine joins it with the file's name as it stands
        params.slot_save_path = f"{options.slot_save_path.absolute()}/"
    for name, kv_type in (("k", options.cache_type_k), ("v", options.cache_type_v)):
        value = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_type.upper()}")
        setattr(params, f"cache_type_{name}", value)
    flash = _FLASH_ATTENTION[options.flash_attn]
    flash_name = f"LLAMA_FLASH_ATTN_TYPE_{flash}"
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, flash_name)
    params.cache_ram_mib = options.cache_ram
    params.cpuparams.n_threads = options.threads
    batch_tokens = options.batch_size or _default_batch_tokens(xllamacpp)
    if batch_tokens is not None:
        params.n_batch = batch_tokens
        params.n_ubatch = min(params.n_ubatch, batch_tokens)
    if options.ubatch_size:
        params.n_ubatch = options.ubatch_size
    params.embedding = options.embeddings
    if options.pooling is not None:
        kind = f"LLAMA_POOLING_TYPE_{options.pooling.upper()}"
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, kind)
    for sampling in _SAMPLING:
        value = getattr(options, sampling.flag[2:].replace("-", "_"))
        if value is not None:
            setattr(params.sampling, sampling.name, value)
            params.sampling.user_sampling_config |= sampling.is_given_bit
    if options.mmproj is not None:
        params.mmproj.path = str(options.mmproj)
    params.ctx_shift = options.context_shift
    params.n_predict = options.n_predict
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = options.slots
    # a slot keeps what was restored into it, whatever other slots do
    params.kv_unified = options.kv_unified
    params.cache_idle_slots = False
    params.use_jinja = True
    params.ui = False
    params.offline = True
    params.verbosity = _LOG_ERRORS


def _free_device_bytes(xllamacpp: Any) -> int:  # noqa: ANN401
    """Return the free memory of all devices with memory of their own."""
    gpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_GPU
    return sum(
        device["memory_free"]
        for device in xllamacpp.get_device_info()
        if device["type"] == gpu
    )


def _default_batch_tokens(xllamacpp: Any) -> int | None:  # noqa: ANN401
    """Return the batch size for this machine's devices; None: the engine's own."""
    kinds = {device["type"] for device in xllamacpp.get_device_info()}
    cpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    return _CPU_BATCH_TOKENS if kinds == {cpu} else None


if __name__ == "__main__":
    sys.exit(main())
