"""Images in requests: base64 in, parts of a message for llama-server out.

>>> parts_of(["data:image/png;base64,iVBORw0K"], text="What is it?")[-1]
{'type': 'text', 'text': 'What is it?'}
"""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from proxy.errors import RequestError
from proxy.ollama.gojson import Fields

_NO_BASE64 = re.compile(r"[^A-Za-z0-9+/\r\n]")
_LINE_ENDS = str.maketrans("", "", "\r\n")
_LONGEST_MAGIC_BYTES = 12
_MAGICS = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)
_UNKNOWN_TYPE = "image/png"
"""The engine looks at the bytes themselves."""


def parse_images(fields: Fields) -> tuple[str, ...]:
    """Read `images` as data URLs. Raises RequestError (400)."""
    urls = []
    for image in fields.array("images", "[]api.ImageData"):
        if not isinstance(image, str):
            raise fields.refuse("images", image, "api.ImageData")
        text = image.translate(_LINE_ENDS)
        _check_base64(text)
        head = base64.b64decode(text[: 4 * -(-_LONGEST_MAGIC_BYTES // 3)])
        found = (name for magic, name in _MAGICS if head.startswith(magic))
        urls.append(f"data:{next(found, _UNKNOWN_TYPE)};base64,{text}")
    return tuple(urls)


def _check_base64(text: str) -> None:
    """Refuse what Go would not decode, in its words."""
    try:
        binascii.a2b_base64(text.encode(), strict_mode=True)
    except (binascii.Error, ValueError) as exc:
        stray = _NO_BASE64.search(text)
        at = stray.start() if stray else len(text)
        raise RequestError(400, f"illegal base64 data at input byte {at}") from exc


def parts_of(urls: Sequence[str], *, text: str) -> list[dict[str, Any]]:
    """Make the content of a message with images; they come before the text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": text}]
