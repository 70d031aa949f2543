"""One turn of a conversation by one client, in a process that ends with it.

`python -m tests.clients.one_turn CLIENT URL MODEL` reads the messages from standard
input, as JSON, and prints the reply.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.clients.library import NODE_MODULES

REPLY_TOKENS = 12
Messages = list[dict[str, str]]
_OPTIONS = {"num_predict": REPLY_TOKENS, "temperature": 0}
_NODE = """
const { Ollama } = require("ollama");
const [url, model, messages, options] = process.argv.slice(1).map((text) => {
  try { return JSON.parse(text); } catch { return text; }
});
new Ollama({ host: url }).chat({ model, messages, options })
  .then((answer) => process.stdout.write(answer.message.content));
"""


def _ollama(url: str, model: str, messages: Messages) -> str:
    client = import_module("ollama").Client(host=url)
    return str(client.chat(model, messages, options=_OPTIONS).message.content)


def _ollama_npm(url: str, model: str, messages: Messages) -> str:
    arguments = [url, model, json.dumps(messages), json.dumps(_OPTIONS)]
    return subprocess.run(
        ["node", "-e", _NODE, *arguments],
        env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def _langchain(url: str, model: str, messages: Messages) -> str:
    chat = import_module("langchain_ollama").ChatOllama(
        model=model, base_url=url, **_OPTIONS
    )
    return str(chat.invoke([(m["role"], m["content"]) for m in messages]).content)


def _llama_index(url: str, model: str, messages: Messages) -> str:
    llm = import_module("llama_index.llms.ollama").Ollama(
        model=model,
        base_url=url,
        request_timeout=120,
        additional_kwargs=_OPTIONS,
    )
    message = import_module("llama_index.core.llms").ChatMessage
    return str(llm.chat([message(**m) for m in messages]).message.content)


def _litellm(url: str, model: str, messages: Messages) -> str:
    answer = import_module("litellm").completion(
        f"ollama_chat/{model}",
        messages=messages,
        api_base=url,
        max_tokens=REPLY_TOKENS,
        temperature=0,
    )
    return str(answer.choices[0].message.content)


def _llm(url: str, model: str, messages: Messages) -> str:
    # the command line takes no conversation of others: the first and the last message
    command = Path(sys.executable).with_name("llm")
    options = [part for pair in _OPTIONS.items() for part in ("-o", *map(str, pair))]
    return subprocess.run(
        [
            str(command), "-m", f"ollama/{model}", *options, "-n",
            "-s", messages[0]["content"], messages[-1]["content"],
        ],
        env={**os.environ, "OLLAMA_HOST": url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.rstrip("\n")  # fmt: skip


def _openai(url: str, model: str, messages: Messages) -> str:
    client = import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=REPLY_TOKENS, temperature=0
    )
    return str(answer.choices[0].message.content)


def _openai_responses(url: str, model: str, messages: Messages) -> str:
    client = import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.responses.create(
        model=model,
        instructions=messages[0]["content"],
        input=messages[1:],
        max_output_tokens=REPLY_TOKENS,
        temperature=0,
    )
    return str(answer.output_text)


def _anthropic(url: str, model: str, messages: Messages) -> str:
    client = import_module("anthropic").Anthropic(base_url=url, api_key="none")
    answer = client.messages.create(
        model=model,
        system=messages[0]["content"],
        messages=messages[1:],
        max_tokens=REPLY_TOKENS,
        extra_body={"temperature": 0},
    )
    return str(answer.content[0].text)


TURNS: dict[str, Callable[[str, str, Messages], str]] = {
    "ollama": _ollama,
    "ollama-npm": _ollama_npm,
    "langchain-ollama": _langchain,
    "llama-index-llms-ollama": _llama_index,
    "litellm": _litellm,
    "llm-ollama": _llm,
    "openai": _openai,
    "openai-responses": _openai_responses,
    "anthropic": _anthropic,
}

if __name__ == "__main__":
    client, url, model = sys.argv[1:]
    sys.stdout.write(TURNS[client](url, model, json.load(sys.stdin)))
