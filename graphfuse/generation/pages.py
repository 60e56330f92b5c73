"""Pages of the paged caches: who holds which, and which hold the beginning of a text that another one shares.

A page that is full of known tokens is remembered by what it holds: the tokens, and the page before it. A sequence that
begins with the same tokens holds the same pages. A page nobody holds any more keeps its contents until it is needed for
something else; of these the one that was let go of first is taken first.

Page 0 is nobody's: rows that pad a batch write there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Contents = tuple[int, tuple[int, ...]]
"""The serial number of what the page before holds (0: there is none), and the tokens of this one."""


@dataclass
class _Known:
    """What a page holds."""

    contents: Contents
    serial: int


class PagePool:
    """Pages 1 … num_pages - 1, each of `page_size` tokens. Knows nothing of tensors."""

    def __init__(self, num_pages: int, page_size: int, *, share: bool = True) -> None:
        """`share=False`: pages are never remembered (a recurrent state cannot be shared)."""
        self.page_size = page_size
        self.num_pages = num_pages
        self._share = share
        self._holders = [0] * num_pages
        self._empty = list(range(num_pages - 1, 0, -1))
        self._let_go: OrderedDict[int, None] = OrderedDict()  # without holders, contents kept; oldest first
        self._known: dict[int, _Known] = {}
        self._pages: dict[Contents, int] = {}
        self._serial = 0

    @property
    def num_free(self) -> int:
        """How many pages can be taken."""
        return len(self._empty) + len(self._let_go)

    @property
    def used(self) -> float:
        """The share of pages that somebody holds, 0 to 1."""
        return 1 - self.num_free / max(1, self.num_pages - 1)

    def take(self) -> int | None:
        """A page for one holder, or None if there is none."""
        if self._empty:
            page = self._empty.pop()
        elif self._let_go:
            page, _ = self._let_go.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def shared(self, token_ids: Sequence[int]) -> list[int]:
        """Pages that hold the beginning of `token_ids`, as many as there are, now held once more.

        At least one token is left out, since somebody has to compute what follows them."""
        found: list[int] = []
        before = 0
        for end in range(self.page_size, len(token_ids), self.page_size):
            page = self._pages.get((before, tuple(token_ids[end - self.page_size : end])))
            if page is None:
                break
            before = self._known[page].serial
            found.append(page)
        for page in found:
            self._let_go.pop(page, None)
            self._holders[page] += 1
        return found

    def remember(self, pages: Sequence[int], token_ids: Sequence[int], num_remembered: int) -> int:
        """What a sequence's pages hold, or will when the steps launched so far are done: all that `token_ids` fill.
        `num_remembered` of them are remembered. Returns how many are now."""
        if not self._share:
            return 0
        for index in range(num_remembered, len(token_ids) // self.page_size):
            page = pages[index]
            before = self._known[pages[index - 1]].serial if index else 0
            contents = (before, tuple(token_ids[index * self.page_size : (index + 1) * self.page_size]))
            self._serial += 1
            if page not in self._known:
                # Another page may hold the same; new sequences get that one, and this one's next pages follow it.
                serial = self._known[self._pages[contents]].serial if contents in self._pages else self._serial
                self._known[page] = _Known(contents, serial)
                self._pages.setdefault(contents, page)
            num_remembered = index + 1
        return num_remembered

    def give_back(self, pages: Sequence[int], *, forget: bool = False) -> None:
        """One holder less for each page; `forget`: what they hold is not to be shared."""
        for page in reversed(pages):  # the end of a text is of less use to others than its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if forget:
                self._forget(page)
            if page in self._known:
                self._let_go[page] = None
            else:
                self._empty.append(page)

    def _forget(self, page: int) -> None:
        known = self._known.pop(page, None)
        if known is not None and self._pages.get(known.contents) == page:
            del self._pages[known.contents]
