r"""A model that says what it was told to, so that a real runner calls tools on demand.

Its one layer adds nothing: each token is followed by one fixed token. A reply is cut
into pieces that are tokens of their own, each of them unique; from the last token of
the prompt it runs piece by piece to the end of the turn. Prompts for the three kinds
of reply end in three different tokens.

Rules:
1. The chat template is in the style of Hermes and Qwen: `<think>`, `<tool_call>`,
   `<tool_response>`, `enable_thinking`. Variants without tools or thinking exist.
2. Greedy or not, the reply is the same: the next token is far ahead of all others.
3. The pieces are user-defined tokens: a reply that is put back into a prompt has the
   ids that it was generated with.

>>> pieces = _cut("one two one two.", taken=set())
>>> pieces, "".join(pieces)
(['one ', 'two ', 'one two.'], 'one two one two.')
"""

import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.model_shapes import HEAD_DIM
from tests.models import byte_letters

_END, _START, _STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TO_USER, _TO_TOOL, _UNTHINKING = (
    "assistant\n",
    "assistant \n",
    "<think>\n\n</think>\n\n",
)
"""What a prompt ends with."""

_FORWARD = 4.0
"""Weight of the way from one token to the next; the norm makes the logit about 80."""

_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}"
    "{% else %}{% set first = '' %}{% endif %}"
)
_LAST_QUESTION = (
    "{%- set asked = namespace(at=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}"
    "{% endfor %}"
)
_PLAIN_SYSTEM = (
    "{%- if first %}{{ '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}{% endif %}"
)
_TOOLS_SYSTEM = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if first %}{{ first + '\\n\\n' }}{% endif %}"
    "{{ 'These functions may be called:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n</tools>\\nA call is an object with name and arguments within <tool_call>"
    "</tool_call> tags.<|im_end|>\\n' }}"
    "{% elif first %}{{ '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}{% endif %}"
)
_THINKING = (
    "{%- set content = message.content if message.content is string else '' %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% set thinking = '' %}"
    "{% if message.role == 'assistant' and message.reasoning_content"
    " and loop.index0 > asked.at %}"
    "{% set thinking = '<think>\\n' + message.reasoning_content.strip('\\n') +"
    " '\\n</think>\\n\\n' %}{% endif %}"
)
_NO_THINKING = "{%- set content = message.content or '' %}{% set thinking = '' %}"
_TOOL_CALLS = (
    "{%- if message.tool_calls %}{% for call in message.tool_calls %}"
    "{% if not loop.first or content %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}{% endfor %}{% endif %}"
)
_TOOL_RESULTS = (
    "{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n'"
    " + content + '\\n</tool_response><|im_end|>\\n' }}{% else %}"
)
_PROMPT_FOR_TOOL = (
    "{%- if messages[-1].role == 'tool' %}{{ '<|im_start|>assistant \\n' }}"
    "{% else %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_PROMPT_UNTHINKING = (
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a model says; a reply that is not given is the end of the turn at once."""

    to_user: str
    """After a message of anybody but a tool."""
    to_tool: str = ""
    """After the result of a tool."""
    unthinking: str = ""
    """Where the request forbids thinking, whatever the last message is."""
    knows_tools: bool = True
    thinks: bool = True
    is_endless: bool = False
    """Whether `to_user` begins anew at its end, until something stops it."""


def chat_template(script: Script) -> str:
    """Write the chat template, in Jinja, of a model with this script."""
    tools = script.knows_tools
    return "".join(
        [
            _SYSTEM,
            _TOOLS_SYSTEM if tools else _PLAIN_SYSTEM,
            _LAST_QUESTION if script.thinks else "",
            "{%- for message in messages %}",
            _THINKING if script.thinks else _NO_THINKING,
            _TOOL_RESULTS if tools else "",
            "{%- if not (loop.first and message.role == 'system') %}"
            "{{ '<|im_start|>' + message.role + '\\n' + thinking + content }}",
            _TOOL_CALLS if tools else "",
            "{{ '<|im_end|>\\n' }}{% endif %}",
            "{%- endif %}" if tools else "",
            "{%- endfor %}{% if add_generation_prompt %}",
            _PROMPT_FOR_TOOL if tools else "{{ '<|im_start|>assistant\\n' }}",
            _PROMPT_UNTHINKING if script.thinks else "",
            "{%- endif %}",
        ]
    )


def write_scripted_model(path: Path, script: Script) -> Path:
    """Write a GGUF of about 2 MB; the same script gives the same file."""
    kinds = gguf.TokenType
    tokens = [_END, _START, _STOP]
    types = [int(kinds.CONTROL)] * 3
    tokens += [byte_letters()[byte] for byte in range(256)]
    types += [int(kinds.NORMAL)] * 256
    marks = [*_MARKS, _TO_USER, _TO_TOOL, _UNTHINKING]
    following: dict[str, str] = {}
    taken: set[str] = set()
    for start, text in (
        (_TO_USER, script.to_user),
        (_TO_TOOL, script.to_tool),
        (_UNTHINKING, script.unthinking),
    ):
        pieces = _cut(text, taken=taken)
        following |= dict(zip([start, *pieces], [*pieces, _STOP], strict=True))
        if script.is_endless and start == _TO_USER:
            following[pieces[-1]] = pieces[0]
    added = list(dict.fromkeys([*marks, *taken]))
    tokens += added
    types += [int(kinds.USER_DEFINED)] * len(added)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    n_embd = -(-len(tokens) // HEAD_DIM) * HEAD_DIM
    output = np.zeros((len(tokens), n_embd), dtype=np.float32)
    for token, token_id in ids.items():
        output[ids[following.get(token, _STOP)], token_id] = _FORWARD
    _write(path, script, tokens, types, output)
    return path


def _cut(text: str, *, taken: set[str]) -> list[str]:
    """Cut a text into pieces that nobody has taken, and take them.

    A piece is a mark, or a word with the space behind it, or longer where that is
    taken. Raises IndexError for a whole text that is taken.
    """
    words = _words(text)
    pieces: list[str] = []
    while words:
        piece = words.pop(0)
        while piece in taken and words:
            piece += words.pop(0)
        while piece in taken:
            before = pieces.pop()
            taken.remove(before)
            piece = before + piece
        taken.add(piece)
        pieces.append(piece)
    return pieces


def _words(text: str) -> list[str]:
    """Split into marks, and words with the space behind them."""
    marks = "|".join(map(re.escape, _MARKS))
    return [
        word
        for part in re.split(f"({marks})", text)
        for word in ([part] if part in _MARKS else re.findall(r"[^ ]* |[^ ]+", part))
    ]


def _write(
    path: Path,
    script: Script,
    tokens: list[str],
    types: list[int],
    output: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> None:
    n_embd = output.shape[1]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Scripted")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_block_count(1)
    writer.add_context_length(131072)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_head_count(n_embd // HEAD_DIM)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # the engine wants one; two zero bytes are no text
    writer.add_token_merges([" ".join([byte_letters()[0]] * 2)])
    writer.add_bos_token_id(tokens.index(_END))
    writer.add_eos_token_id(tokens.index(_STOP))
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template(script))
    ones = np.ones(n_embd, dtype=np.float32)
    shapes = {
        "attn_q": (n_embd, n_embd),
        "attn_k": (HEAD_DIM, n_embd),
        "attn_v": (HEAD_DIM, n_embd),
        "attn_output": (n_embd, n_embd),
        "ffn_gate": (HEAD_DIM, n_embd),
        "ffn_up": (HEAD_DIM, n_embd),
        "ffn_down": (n_embd, HEAD_DIM),
    }
    tensors = {
        "token_embd": np.eye(len(tokens), n_embd, dtype=np.float32),
        "output_norm": ones,
        "output": output,
        "blk.0.attn_norm": ones,
        "blk.0.ffn_norm": ones,
    }
    for name, shape in shapes.items():
        tensors[f"blk.0.{name}"] = np.zeros(shape, dtype=np.float32)
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
