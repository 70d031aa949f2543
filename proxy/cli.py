"""The command line: `kvbus serve | store | model | demo`. No logic of its own.

Exit codes: 0 done, 1 it ran and failed, 2 a setting or the environment is wrong (one
clear line on stderr).
"""

import argparse
import os
import sys
from collections.abc import Sequence

from proxy import __version__, config, environment
from proxy.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code of the process."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as exc:
        print(f"kvbus: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvbus",
        description="One KV cache for every Ollama / llama.cpp process.",
    )
    parser.add_argument("--version", action="version", version=f"kvbus {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="answer the Ollama API",
        description="Answer the Ollama API; restore stored prompt prefixes. Each"
        " option can also be given by the environment variable in brackets, or by its"
        " name in the file given with --config. Flags win over the environment, the"
        " environment over the file.",
    )
    config.add_arguments(serve)
    serve.set_defaults(run=_serve)

    store = commands.add_parser(
        "store",
        help="run the block store as a service of its own",
        description="Run the block store until it is ended; `kvbus serve` with the"
        " same store settings finds and uses it. Each option can also be given by the"
        " environment variable in brackets, or in the file given with --config, which"
        " may be the one of `kvbus serve`.",
    )
    config.add_arguments(store, is_for_store=True)
    store.set_defaults(run=_store)

    model = commands.add_parser("model", help="the model that comes along")
    model.add_argument(
        "action",
        choices=("get", "path", "list"),
        help="fetch the default model, tell where it is, list what is kept",
    )
    model.add_argument("--cache-dir", metavar="DIR", help="instead of the user's cache")
    model.set_defaults(run=_model)

    demo = commands.add_parser(
        "demo", help="compare stock llama-server with kvbus, on the default model"
    )
    demo.add_argument("--json", metavar="FILE", help="write the figures here as well")
    demo.set_defaults(run=_demo)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from proxy import app

    _warn_of_variables()
    return app.serve(config.load(arguments, os.environ))


def _store(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from proxy.store import server

    _warn_of_variables()
    options = config.load(arguments, os.environ).store_options()
    if options is None:
        raise ConfigError("--store none: there is no store to run")
    return server.run(replace(options, linger_seconds=None))


def _warn_of_variables() -> None:
    warning = environment.unknown_variables(os.environ)
    if warning:
        print(f"kvbus: {warning}", file=sys.stderr)


def _model(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from proxy import model_files

    given = arguments.cache_dir
    cache = Path(given).expanduser() if given else model_files.default_cache_dir()
    if arguments.action == "get":
        path = model_files.ensure_default_model(
            cache, lambda text: print(text, flush=True)
        )
        print(path)
    elif arguments.action == "path":
        print(model_files.default_model_path(cache))
    else:
        for path in model_files.list_models(cache):
            print(path)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from proxy import demo

    return demo.run(json_path=arguments.json)
