"""The choice of cases that the suite runs."""

from itertools import combinations, product

from pairwise import cover


def held(cases):
    return {pair for case in cases for size in (1, 2) for pair in combinations(case, size)}


def test_every_pair_of_a_product_is_kept_in_few_cases():
    cases = list(product("abcd", "ABC", "xyz", "12"))
    kept = [cases[number] for number in cover(cases)]
    assert held(kept) == held(cases)
    assert len(kept) <= 15 < 12 * 6, "at least 12: the two longest lists' pairs"
