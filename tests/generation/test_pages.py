"""`PagePool`: pages have the holders they were given to, and shared ones hold what they are said to."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse.generation.pages import PagePool


def fill(pool, token_ids):
    """A text's pages: shared ones, then new ones, all remembered."""
    pages = pool.shared(token_ids)
    num_shared = len(pages)
    while len(pages) * pool.page_size < len(token_ids):
        pages.append(pool.take())
    pool.remember(pages, token_ids, num_shared)
    return pages, num_shared


def test_page_zero_is_nobodys_and_all_others_can_be_taken_once():
    pool = PagePool(4, 2)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    assert pool.take() is None and pool.num_free == 0 and pool.used == 1.0
    pool.give_back(taken)
    assert pool.num_free == 3 and pool.used == 0.0


def test_whole_pages_of_equal_beginnings_are_shared_but_never_a_whole_text():
    pool = PagePool(20, 2)
    first, _ = fill(pool, [1, 2, 3, 4, 5])
    second, num_shared = fill(pool, [1, 2, 3, 4, 6, 7])
    assert num_shared == 2 and second[:2] == first[:2] and second[2] not in first
    third, num_shared = fill(pool, [1, 2, 3, 4])
    assert num_shared == 1, "the last token has to be computed"
    assert third[1] != first[1]
    _, num_shared = fill(pool, [3, 4, 1, 2, 9])
    assert num_shared == 0, "equal pages behind another beginning"


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back_and_keeps_what_it_holds():
    pool = PagePool(5, 2)
    first, _ = fill(pool, [1, 2, 3])
    second, _ = fill(pool, [1, 2, 4])
    assert pool.num_free == 1
    pool.give_back(first)
    assert pool.num_free == 2, "the second text holds the first page too"
    pool.give_back(second)
    assert pool.num_free == 4
    again, num_shared = fill(pool, [1, 2, 5])
    assert num_shared == 1 and again[0] == first[0]


def test_what_was_let_go_of_first_is_taken_first_and_a_texts_end_before_its_beginning():
    pool = PagePool(5, 1)
    pages, _ = fill(pool, [1, 2, 3, 4])
    pool.give_back(pages)
    assert pool.take() == pages[3]
    assert pool.shared([1, 2, 3, 4, 5]) == pages[:3]


def test_pages_that_are_to_be_forgotten_are_not_shared():
    pool = PagePool(5, 2)
    pages, _ = fill(pool, [1, 2, 3])
    pool.give_back(pages, forget=True)
    assert pool.shared([1, 2, 3]) == []


def test_nothing_is_shared_where_that_is_off():
    pool = PagePool(5, 2, share=False)
    fill(pool, [1, 2, 3])
    assert pool.shared([1, 2, 3]) == []


def test_of_two_pages_that_hold_the_same_the_later_texts_follow_one():
    """Two texts that were let in at once: neither saw the other's pages."""
    pool = PagePool(20, 1)
    first, second = [pool.take() for _ in range(3)], [pool.take() for _ in range(3)]
    pool.remember(first, [1, 2, 3], 0)
    pool.remember(second, [1, 2, 4], 0)
    assert pool.shared([1, 2, 4, 5]) == [first[0], first[1], second[2]]
    assert pool.shared([1, 2, 3, 5]) == first


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pages_are_never_held_twice_but_by_texts_that_begin_alike(data):
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    pool = PagePool(data.draw(st.integers(2, 12)), page_size)
    texts: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if texts and data.draw(st.booleans()):
            _, pages = texts.pop(data.draw(st.integers(0, len(texts) - 1)))
            pool.give_back(pages, forget=data.draw(st.booleans()))
        else:
            token_ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            pages = pool.shared(token_ids)
            num_shared = len(pages)
            if -(-len(token_ids) // page_size) - num_shared > pool.num_free:
                pool.give_back(pages)
                continue
            while len(pages) * page_size < len(token_ids):
                pages.append(pool.take())
            pool.remember(pages, token_ids, num_shared)
            texts.append((token_ids, pages))
        contents: dict[int, list[int]] = {}
        for token_ids, pages in texts:
            assert 0 not in pages and len(set(pages)) == len(pages)
            for index, page in enumerate(pages):
                up_to = token_ids[: (index + 1) * page_size]
                assert contents.setdefault(page, up_to) == up_to
        held = {page for _, pages in texts for page in pages}
        assert pool.num_free == pool.num_pages - 1 - len(held)
