"""`mnemos chat`: what a turn reads, what its commands do to the state, Ctrl-C, and errors of one line."""

import io
import os
import re
import signal
import sys
from shutil import copytree

import pytest
import tiny_decoder
import torch
from refusals import refuses
from tiny_decoder import library

import mnemos
from mnemos.lab.cli import chat as chats
from mnemos.lab.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder.save(tmp_path_factory.mktemp("chat") / "llama")


def said(monkeypatch, capsys, folder, lines, *options):
    """(exit code, standard output, lines of standard error) of a chat with these lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = main(["chat", str(folder), "--temperature", "0", "--length", "5", *options])
    found = capsys.readouterr()
    return code, found.out, found.err.splitlines()


def talk_of(folder, **settings):
    from mnemos.lab.hosted.hub import language_model

    model, tokenizer = language_model(str(folder))
    return chats.Chat(model, chats.Turns(tokenizer, **settings), 5, {"temperature": 0}), tokenizer


@pytest.mark.parametrize("system", [None, "be kind"])
@pytest.mark.parametrize("ended", [True, False])
def test_turns_read_what_the_template_writes_of_the_whole_chat(folder, system, ended):
    """Whether an answer has the end token of its own, or was stopped before it."""
    talk, tokenizer = talk_of(folder, system=system)
    turns = talk.turns
    end = tokenizer.convert_tokens_to_ids("<e>")
    answer = tokenizer("yes", add_special_tokens=False)["input_ids"]
    read = turns.first("  so? ")
    for text in ("and?", "<e> it"):
        read += answer + [end] * ended
        read += turns.following(text, read[-1])
    begin = [{"role": "system", "content": system}] if system else []
    words = ["so?", "yes", "and?", "yes", "<e> it"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
    whole = tokenizer.apply_chat_template(begin + messages, tokenize=False, add_generation_prompt=True)
    assert read == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert talk.ends == [end]


def test_a_chat_forks_goes_back_and_is_saved(folder, tmp_path):
    talk, _ = talk_of(folder)
    answers = []

    def say(text):
        answers.append([])
        return talk.answer(text, lambda token: answers[-1].append(int(token)), lambda: False)

    first = say("so")
    assert first.written == 5
    talk.command("fork", "a")
    talk.command("save", str(tmp_path / "s"))
    say("be it")
    state, size = talk.stream, talk.state_bytes
    talk.command("back", "")
    assert talk.stream is talk.named["a"]
    assert talk.state_bytes < size
    say("other")
    talk.command("back", "a")
    say("be it")
    talk.command("load", str(tmp_path / "s"))
    found = say("be it")
    assert answers[1] == answers[3] == answers[4] != answers[2]
    assert found.read < first.read  # the new tokens alone
    assert torch.equal(talk.stream.state.seen, state.state.seen)


def test_a_terminal_answers_lines_and_refuses_in_one(monkeypatch, capsys, folder, tmp_path):
    lines = ["/back", "/save x", "so", "", "/fork", "/fork a", "/nothing", "/back b", f"/load {tmp_path}/no"]
    code, out, err = said(monkeypatch, capsys, folder, [*lines, "/new", "so", "/help me", "/quit", "never"])
    assert code == 0
    first, second = out.splitlines()
    assert first == second
    refused = [line for line in err if line.startswith("mnemos: ")]
    assert len(refused) == 6, err
    costs = [line for line in err if line.startswith("[read ")]
    assert len(costs) == 2
    assert re.fullmatch(r"\[read \d+ tokens in .* s, wrote 5 at .* tokens/s; state .* KiB, grows\]", costs[0])
    assert all(line in err for line in chats.HELP.splitlines())


def test_a_line_of_another_encoding_is_refused_and_the_chat_goes_on(monkeypatch, capsys, folder):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"so\nna\xefve\nbe it\n"), encoding="utf-8"))
    assert main(["chat", str(folder), "--temperature", "0", "--length", "5"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert [line[:6] for line in err] == ["[read ", "mnemos", "[read "]
    assert err[1] == "mnemos: expected text in utf-8, found the byte 0xef; convert it"


def test_a_stream_of_several_rows_is_no_chat(folder, tmp_path):
    talk, _ = talk_of(folder)
    talk.new.prefill(torch.tensor([[5, 6], [7, 8]])).save(tmp_path / "two")
    refuses("/load: expected a chat, which is one row, found 2 rows", talk.command, "load", str(tmp_path / "two"))
    assert talk.stream is talk.new
    assert not talk.before


@pytest.fixture
def with_ctrl_c():
    """SIGINT has its usual handler: a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("with_ctrl_c")
def test_ctrl_c_ends_an_answer_and_not_the_chat(monkeypatch, capsys, folder):
    before = signal.getsignal(signal.SIGINT)
    put = library.TextStreamer.put
    monkeypatch.setattr(
        library.TextStreamer, "put", lambda self, x: (put(self, x), os.kill(os.getpid(), signal.SIGINT))
    )
    code, out, err = said(monkeypatch, capsys, folder, ["so", "be it"])
    assert (code, len(out.splitlines())) == (0, 2)
    assert [line.partition("wrote ")[2][:1] for line in err] == ["1", "1"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_a_turn_is_read_drops_it(folder):
    talk, _ = talk_of(folder)
    assert talk.answer("so", lambda token: None, lambda: True) is None
    assert talk.stream is talk.new


def test_with_a_window_the_state_is_constant(monkeypatch, capsys, folder, tmp_path):
    lines = ["so be it, so be it, so be it", "so be it", "it"]
    code, out, err = said(monkeypatch, capsys, folder, lines, "--window", "16", "--sinks", "2")
    assert (code, len(out.splitlines())) == (0, 3)
    sizes = [re.search(r"state (.*), constant\]", line)[1] for line in err]
    assert len(set(sizes)) == 1
    assert said(monkeypatch, capsys, folder, lines, "--sinks", "2")[0] == 2
    refused = ["--length 0", "--temperature -1", "--top-p 0", "--top-k -1", "--window 0", "--window 8 --sinks 8"]
    for words in refused:
        code, _, err = said(monkeypatch, capsys, "nowhere", [], *words.split())
        assert (code, len(err)) == (2, 1)
        assert err[0].startswith(f"mnemos: {words.split()[-2]}: expected ")

    saved = copytree(folder, tmp_path / "saved")
    model = library.AutoModelForCausalLM.from_pretrained(folder)
    mnemos.linearise(model, window=16, sinks=2, state="none")
    model.save_pretrained(saved)
    assert said(monkeypatch, capsys, saved, lines)[1] == out
    code, _, err = said(monkeypatch, capsys, saved, lines, "--window", "8")
    assert (code, err[0].endswith(f"without a state, found {saved} linearised; leave it out")) == (2, True)
    mnemos.hosts.save_adapter(model, tmp_path / "a")
    assert said(monkeypatch, capsys, folder, lines, "--adapter", str(tmp_path / "a"))[1] == out
    mnemos.linearise(mnemos.unlinearise(model), window=16, sinks=2, rank=2)
    mnemos.hosts.save_adapter(model, tmp_path / "a")
    code, out, err = said(monkeypatch, capsys, folder, lines, "--adapter", str(tmp_path / "a"))
    assert (code, len(out.splitlines())) == (0, 3)
    assert all("constant]" in line for line in err)
    assert said(monkeypatch, capsys, folder, lines, "--adapter", "a", "--window", "8")[0] == 2
    (code, _, err) = said(monkeypatch, capsys, tmp_path / "none", lines, "--adapter", str(tmp_path / "b"))
    assert code == 2  # before the model is read
    assert "--adapter: expected" in err[0]


class Typed(io.StringIO):
    """What is typed; in place of the first line Ctrl-C. terminal: whether it is typed at one."""

    terminal, asked = True, False

    def isatty(self):
        return self.terminal

    def readline(self, *given):
        if not self.asked:
            self.asked = True
            raise KeyboardInterrupt
        return super().readline(*given)


@pytest.mark.usefixtures("with_ctrl_c")
@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_at_a_terminal_drops_what_is_typed_and_without_one_ends(monkeypatch, capsys, folder, terminal):
    typed = Typed("so\n")
    typed.terminal = terminal
    monkeypatch.setattr(sys, "stdin", typed)
    code = main(["chat", str(folder), "--temperature", "0", "--length", "3"])
    found = capsys.readouterr()
    if terminal:
        assert (code, found.out.count("> "), len(found.out.splitlines())) == (0, 3, 2)
        assert found.err.splitlines()[:3] == ["/help lists the commands", "", "/quit or Ctrl-D ends the chat"]
    else:
        assert (code, found.out, found.err) == (130, "", "mnemos: interrupted\n")


def test_a_template_that_refuses_a_message_is_one_line(monkeypatch, capsys, folder, tmp_path):
    strict = copytree(folder, tmp_path / "strict")
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no\\nsystem') }}{% endif %}"
    before = (strict / "chat_template.jinja").read_text()
    (strict / "chat_template.jinja").write_text(template + before)
    assert said(monkeypatch, capsys, strict, ["so"])[:2] == said(monkeypatch, capsys, folder, ["so"])[:2]
    code, _, err = said(monkeypatch, capsys, strict, ["so"], "--system", "be kind")
    assert (code, len(err)) == (2, 1)
    assert "found one that refuses them (no\\nsystem); leave --system out" in err[0]


def test_without_a_template_the_text_goes_on(monkeypatch, capsys, folder, tmp_path):
    plain = copytree(folder, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    code, out, err = said(monkeypatch, capsys, plain, ["so", "it"])
    assert (code, len(out.splitlines()), len(err)) == (0, 2, 3)
    assert "no chat template" in err[0]
    assert err[1].startswith("[read 2 tokens")
    assert said(monkeypatch, capsys, plain, [], "--system", "be")[0] == 2


def test_the_folder_of_a_training_names_the_model_in_it(monkeypatch, capsys, folder, tmp_path):
    copytree(folder, tmp_path / "run/model")
    _, _, err = said(monkeypatch, capsys, tmp_path / "run", ["so"])
    assert err[0].endswith(f"found a folder without its config.json; name {tmp_path}/run/model")
    (tmp_path / "run/recipe.json").write_text("{}")
    (tmp_path / "run/model/config.json").unlink()
    _, _, err = said(monkeypatch, capsys, tmp_path / "run/model", ["so"])
    assert f"found a run of mnemos; mnemos sample {tmp_path}/run uses its model, mnemos export {tmp_path}/r" in err[0]


@pytest.mark.parametrize("missing", ["tokenizer", "config.json", "a folder"])
def test_a_folder_without_a_part_is_one_line(monkeypatch, capsys, folder, tmp_path, missing):
    other = copytree(folder, tmp_path / "other") if missing != "a folder" else tmp_path / "none"
    for path in other.glob(f"{missing}*"):
        path.unlink()
    code, out, err = said(monkeypatch, capsys, other, ["so"])
    assert (code, out, len(err)) == (2, "", 1), err
    found = {"tokenizer": "a tokenizer", "config.json": "without its config.json", "a folder": "no such folder"}
    assert err[0].startswith(f"mnemos: {other}: expected ")
    assert found[missing] in err[0]


def test_an_answer_has_no_power_over_the_terminal(folder, monkeypatch, capsys):
    def answer(talk, text, put, stopped):
        for token in talk.tokenizer("so\x1b]0;title\x07 be", add_special_tokens=False)["input_ids"]:
            put(torch.tensor([token]))
        return chats.Answer(1, 1, 1.0, 1.0)

    monkeypatch.setattr(chats.Chat, "answer", answer)
    code, out, _ = said(monkeypatch, capsys, folder, ["hello"])
    assert (code, out) == (0, "so\\x1b]0;title\\x07 be\n")
