"""Pictures inside pages."""

import base64
from pathlib import Path

from mcbn.page.html import Markup, element


def image_part(path: Path, alt: str) -> Markup:
    """Embed a PNG under the words that stand for it."""
    address = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return element("figure", element("img", src=address, alt=alt), element("figcaption", alt))
