"""Sealed pages: any changed byte shows, and the page stays a page."""

from quantkit.seals import page_intact, seal_page

PAGE = "<!doctype html>\n<p>KL 0.05 nats, 中文</p>\n".encode()


def test_a_sealed_page_is_the_page_and_one_comment_line() -> None:
    sealed = seal_page(PAGE)
    assert sealed.startswith(PAGE)
    assert sealed.removeprefix(PAGE).count(b"\n") == 1
    assert sealed.removeprefix(PAGE).startswith(b"<!--")
    assert page_intact(sealed)
    assert page_intact(seal_page(PAGE.rstrip()))


def test_every_changed_removed_and_added_byte_is_found() -> None:
    sealed = seal_page(PAGE)
    for position in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[position] ^= 1
        assert not page_intact(bytes(flipped)), position
        assert not page_intact(sealed[:position] + sealed[position + 1 :]), position
        assert not page_intact(sealed[:position] + b"x" + sealed[position:]), position
    assert not page_intact(sealed + b"\n")


def test_a_page_without_seal_and_an_empty_file_are_not_intact() -> None:
    assert not page_intact(PAGE)
    assert not page_intact(b"")


def test_a_page_that_quotes_a_seal_is_sealed_all_the_same() -> None:
    assert page_intact(seal_page(seal_page(PAGE)))
