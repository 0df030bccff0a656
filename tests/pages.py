"""Pages as a browser meets them: tags, words and embedded data."""

import json
import re
from html.parser import HTMLParser

EVIL = "<script>alert(1)</script>"


class Reader(HTMLParser):
    """Collects tags, text outside scripts, and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.blocks: dict[str, object] = {}
        self.inside: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.words.append(data)
        elif self.inside.get("type") == "application/json":
            self.blocks[str(self.inside["id"])] = json.loads(data)


def assert_offline(text: str) -> None:
    """Nothing on the page has an address, but for the data it holds itself."""
    assert not re.search(r"(?i)(https?:)?//[a-z0-9.-]+\.[a-z]", text)
    tags = Reader(text).tags
    policies = [attributes["content"] for _, attributes in tags if "http-equiv" in attributes]
    assert policies[0].startswith("default-src 'none';")
    for _, attributes in tags:
        for key in ("src", "href"):
            assert (attributes.get(key) or "data:").startswith("data:")
