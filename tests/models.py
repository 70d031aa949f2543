"""Tiny random models that a real runner loads in a fraction of a second.

The same arguments give the same bytes. The weights are scaled so that greedy text
varies and depends on the whole prompt; the head dimension is 32, so that quantized
KV types work. The vocabulary is a small byte-level one with chat markers.
"""

import functools
import itertools
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from tests import model_shapes
from tests.model_shapes import HEAD_DIM, Architecture, Shapes

Tokenizer = Literal["bpe", "spm"]
FillNames = Literal["present", "older", "texts"]

_LAYERS = {"gemma3": 6, "gpt-oss": 4, "cohere2": 4}  # with a layer without a window

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
USER_DEFINED_TOKENS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = """\
The keeper of the lighthouse wrote down the weather of every day. In the morning the
wind came from the north, and the water was grey under the rain. Nobody had asked for
these notes, but they were kept with care, for there was nothing else to do when the
lamp was out. One evening a ship was seen in the distance, and then another, and soon
there were so many that counting them took until the stars were up. What is the answer
to a question that has not been asked? You are a helpful assistant. Tell me about the
history of the system, then explain how the number of tokens changes the result.
user assistant system The first thing to say is that it works, and why it works so well.
"""


def write_tiny_llama(path: Path, *, seed: int) -> Path:
    """Write the usual tiny model: llama, 2 layers, byte-level BPE, chatml."""
    return write_tiny_model(path, seed=seed)


def write_tiny_model(
    path: Path,
    *,
    seed: int,
    architecture: Architecture = "llama",
    tokenizer: Tokenizer = "bpe",
    add_bos: bool = False,
    n_layer: int | None = None,
    n_embd: int = 128,
    n_head_kv: int = 2,
    head_dim: int = HEAD_DIM,
    n_ctx_train: int = 131072,
    is_endless: bool = False,
    longrope_tokens: int = 0,
    recommended_temperature: float | None = None,
    fills_in: FillNames | None = None,
    has_chat_template: bool = True,
) -> Path:
    """Write a random model of `architecture`; the same arguments give the same file.

    gemma3, gpt-oss and cohere2 have a sliding window; lfm2, granitehybrid, falcon-h1
    and qwen3next are hybrids, mamba is recurrent; deepseek2 keeps latent K only,
    qwen2vl has M-RoPE, deci a layer without K and V. There are n_embd / head_dim
    heads, and a KV row of one layer is n_head_kv * head_dim elements, for K and V each
    (deepseek2 apart). Other heads than of 32 are for llama, qwen and gemma3 only.

    An endless model never chooses a control token, so its greedy text ends at no
    length. With `longrope_tokens` RoPE has other factors in contexts that are
    longer than that. The engine samples with a `recommended_temperature` where
    nobody says otherwise. The tokens of fill-in-the-middle, if there are any, are
    named by the file, in the present or the older way, or known by their texts
    alone.
    """
    n_head = n_embd // head_dim
    num_layers = n_layer or _LAYERS.get(architecture, 2)
    tokens, types, scores, merges = _vocabulary(tokenizer)
    if fills_in is not None:
        tokens = [*tokens, *FILL_TOKENS]
        types = [*types, *[int(gguf.TokenType.CONTROL)] * len(FILL_TOKENS)]
        scores = [*scores, *[0.0] * len(FILL_TOKENS)]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"Tiny {architecture} {seed}")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_block_count(num_layers)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(0 if architecture == "mamba" else 2 * n_embd)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_head_count(n_head)
    if architecture not in ("deci", "lfm2", "granitehybrid"):
        writer.add_head_count_kv(1 if architecture == "deepseek2" else n_head_kv)
    shapes: Shapes = {
        "token_embd": (len(tokens), n_embd),
        "token_embd_norm" if architecture == "lfm2" else "output_norm": (n_embd,),
        "output": (len(tokens), n_embd),
    }
    sizes = (num_layers, n_embd, n_head, n_head_kv)
    match architecture:
        case "mamba":
            shapes |= model_shapes.mamba(writer, num_layers, n_embd)
        case "lfm2":
            shapes |= model_shapes.lfm2(writer, *sizes)
        case "deepseek2":
            shapes |= model_shapes.deepseek2(writer, num_layers, n_embd, n_head)
        case "gpt-oss":
            shapes |= model_shapes.gpt_oss(writer, *sizes)
        case "cohere2":
            del shapes["output"]  # it is the embedding
            shapes |= model_shapes.cohere2(writer, *sizes)
        case "deci":
            shapes |= model_shapes.deci(writer, *sizes)
        case "granitehybrid":
            shapes |= model_shapes.granitehybrid(writer, *sizes)
        case "falcon-h1":
            shapes |= model_shapes.falcon_h1(writer, *sizes)
        case "qwen3next":
            shapes |= model_shapes.qwen3next(writer, *sizes)
        case _:
            shapes |= model_shapes.transformer(
                writer, architecture, *sizes, head_dim=head_dim
            )
    if recommended_temperature is not None:
        writer.add_float32("general.sampling.temp", recommended_temperature)
    if longrope_tokens:
        _add_longrope(writer, longrope_tokens)
    _add_tokenizer(writer, tokenizer, tokens, types, scores, merges, add_bos)
    if fills_in is not None:
        _name_fill_tokens(writer, fills_in, first=len(tokens) - len(FILL_TOKENS))
    if has_chat_template:
        writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(seed)
    bare_names: tuple[str, ...] = (".bias", "ssm_a", "ssm_d")
    if architecture == "falcon-h1":
        bare_names += ("ffn_norm",)
    for name, shape in shapes.items():
        suffix = "" if name.endswith(bare_names) else ".weight"
        values = _weights(random, name, shape)
        if name == "output" and is_endless:
            values[[tokens.index(text) for text in CONTROL_TOKENS]] = 0.0
        writer.add_tensor(name + suffix, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_longrope(writer: gguf.GGUFWriter, original_tokens: int) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original_tokens)
    for name, factor in (("long", 8.0), ("short", 1.0)):
        factors = np.full(HEAD_DIM // 2, factor, dtype=np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _weights(
    random: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Norms are 1; what feeds the residual stream outweighs the embedding."""
    values: NDArray[Any]
    if name.endswith("norm"):
        values = np.ones(shape)
    elif name.endswith("ssm_a"):
        values = -np.broadcast_to(np.arange(1, shape[-1] + 1), shape)
    elif name.endswith(("attn_q", "attn_k")):
        values = random.normal(scale=2.5 / shape[-1] ** 0.5, size=shape)
    elif name.endswith(("attn_output", "ffn_down", "out_proj", "ssm_out")):
        values = random.normal(scale=3 / shape[-1] ** 0.5, size=shape)
    elif name == "token_embd":
        values = random.normal(size=shape)
    else:
        values = random.normal(scale=1 / shape[-1] ** 0.5, size=shape)
    return values.astype(np.float32)


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: Tokenizer,
    tokens: list[str],
    types: list[int],
    scores: list[float],
    merges: list[str],
    add_bos: bool,
) -> None:
    writer.add_tokenizer_model("gpt2" if tokenizer == "bpe" else "llama")
    if tokenizer == "bpe":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores(scores)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index(CONTROL_TOKENS[0]))
    writer.add_eos_token_id(tokens.index(CONTROL_TOKENS[2]))
    writer.add_add_bos_token(add_bos)


def _name_fill_tokens(writer: gguf.GGUFWriter, names: FillNames, *, first: int) -> None:
    of_names = {
        "present": ("fim_pre", "fim_suf", "fim_mid"),
        "older": ("prefix", "suffix", "middle"),
        "texts": (),
    }
    for token_id, name in enumerate(of_names[names], first):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)


@functools.cache
def _vocabulary(
    tokenizer: Tokenizer,
) -> tuple[list[str], list[int], list[float], list[str]]:
    """Give tokens, token types, scores and merges."""
    kinds = gguf.TokenType
    tokens = list(CONTROL_TOKENS)
    types = [int(kinds.CONTROL)] * len(tokens)
    if tokenizer == "spm":
        tokens.append("<unk>")
        types.append(int(kinds.UNKNOWN))
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        types += [int(kinds.BYTE)] * 256
        tokens += [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    else:
        tokens += [byte_letters()[byte] for byte in range(256)]
    pairs = _learn_merges(tokenizer)
    tokens += [first + second for first, second in pairs]
    types += [int(kinds.NORMAL)] * (len(tokens) - len(types))
    tokens += USER_DEFINED_TOKENS
    types += [int(kinds.USER_DEFINED)] * len(USER_DEFINED_TOKENS)
    scores = [float(-rank) for rank in range(len(tokens))]
    return tokens, types, scores, [" ".join(pair) for pair in pairs]


def byte_letters() -> dict[int, str]:
    """Give the printable letter that byte-level BPE uses for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    return letters | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def _learn_merges(tokenizer: Tokenizer, *, count: int = 300) -> list[tuple[str, str]]:
    """Merge the most frequent neighbours of a short text, again and again."""
    letters = byte_letters()
    spaces = {" ": "▁"} if tokenizer == "spm" else {" ": letters[32]}
    words = Counter(" " + word for word in _CORPUS.split())
    split = [
        ([spaces.get(letter, letter) for letter in word], number)
        for word, number in sorted(words.items())
    ]
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for letters_of, number in split:
            for pair in itertools.pairwise(letters_of):
                pairs[pair] += number
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for letters_of, _number in split:
            index = 0
            while index < len(letters_of) - 1:
                if (letters_of[index], letters_of[index + 1]) == best:
                    letters_of[index : index + 2] = ["".join(best)]
                index += 1
    return list(dict.fromkeys(merges))
