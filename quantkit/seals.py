"""Pages with their own hash as the last line, so that a changed figure on a page shows like one in a report."""

from quantkit.canonical import sha256_bytes

_START = b"<!-- sha256 of the lines above: "
_END = b" -->\n"


def seal_page(page: bytes) -> bytes:
    """An HTML page with the hash of its bytes behind it."""
    body = page if page.endswith(b"\n") else page + b"\n"
    return body + _START + sha256_bytes(body).encode() + _END


def page_intact(page: bytes) -> bool:
    """Whether a page is what `seal_page` made."""
    body, _, _ = page.rpartition(_START)
    return body != b"" and seal_page(body) == page
