"""Random recipes and command lines; `make soak` has thousands."""

import soak_commands


def test_random_command_lines_end_in_order(tmp_path):
    found = soak_commands.Found()
    with soak_commands.inside(tmp_path):
        soak_commands.shown(found, 1)
        soak_commands.trained(found, 1)
        soak_commands.others(found, 3)
    assert not found.failed
    assert sum(found.codes.values()) == 5


def test_what_is_not_in_order_is_found(tmp_path):
    ended, words = soak_commands.Ended, ["train", "x"]
    assert soak_commands.problem(words, ended(0, "", "")) is None
    assert soak_commands.problem(words, ended(2, "mnemos: expected\n", "")) is None
    assert "traceback" in soak_commands.problem(words, ended(None, "Traceback\nValueError: no", ""))
    assert "2 lines" in soak_commands.problem(words, ended(2, "mnemos: a\nb\n", ""))
    (tmp_path / "recipe.json").write_text("")
    assert "a folder with" in soak_commands.problem(words, ended(2, "mnemos: a\n", ""), tmp_path)
