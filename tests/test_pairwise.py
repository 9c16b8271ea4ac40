"""The choice of cases that the suite runs."""

from itertools import combinations, product

from pairwise import cover, pairwise


def held(cases):
    return {pair for case in cases for size in (1, 2) for pair in combinations(case, size)}


def test_every_pair_of_a_product_is_kept_in_few_cases():
    cases = list(product("abcd", "ABC", "xyz", "12"))
    kept = [cases[number] for number in cover(cases)]
    assert held(kept) == held(cases)
    assert len(kept) <= 15 < 12 * 6, "at least 12: the two longest lists' pairs"


def test_every_value_is_kept_and_those_of_the_shorter_list_take_turns():
    cases = list(product("abcdef", "ABC"))
    kept = [cases[number] for number in cover(cases, pairs=False)]
    assert sorted(letter for letter, _ in kept) == list("abcdef")
    assert sorted(other for _, other in kept) == list("AABBCC")


def test_two_parameters_and_what_is_no_product_are_kept_whole():
    for cases in (list(product("abc", "ABCD")), ["aA", "bB", "cC"], ["a", "b"], ["aAx"]):
        assert cover(cases) == list(range(len(cases)))


def test_combinations_that_are_not_allowed_are_left_out():
    cases = pairwise("abc", "xyz", "12", allowed=lambda letter, other, number: (letter, other) != ("a", "x"))
    assert ("a", "x") not in {case[:2] for case in cases}
    wanted = {case for case in product("abc", "xyz", "12") if case[:2] != ("a", "x")}
    assert held(cases) == held(wanted)
