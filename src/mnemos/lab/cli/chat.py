"""`mnemos chat`: a chat with a language model. It is a `Stream`: so it forks, goes back, and is saved and loaded."""

import contextlib
import io
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from mnemos.errors import InputError, printable, say

if TYPE_CHECKING:
    import torch

    from mnemos import Stream

HELP = """/fork NAME    keep the chat as it is now under a name
/back [NAME]  go back to before the last turn, or to the chat of that name
/save FILE    write the chat's state to a file
/load FILE    go on from a file that /save wrote with this model
/new          begin a new chat
/quit         end; so does Ctrl-D. Ctrl-C stops an answer"""
_MARK = "\ue000"  # an answer in a rendered template: what follows it there follows every answer
_PIECE = 256  # tokens that are read together; Ctrl-C is heeded between pieces
_TURNS = 8  # states to go back to: each has the size of the state, which may be constant


def chat(
    folder: str,
    *,
    window: int | None = None,
    sinks: int | None = None,
    adapter: Path | None = None,
    system: str | None = None,
    length: int = 512,
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> int:
    """Chat with a language model of Hugging Face Transformers.

    A turn reads the new tokens alone, because the chat is the model's state. Answers go to the standard output; without
    a terminal, each line of the standard input is a turn. In the chat, /help lists the commands that fork it, go back,
    save and load.

    Args:
        folder: a decoder of Transformers with its tokenizer: a folder of save_pretrained, or hf:NAME of the hub
        window: attend to so many last tokens and the first ones alone (mnemos.linearise), so the state stops growing
        sinks: first tokens that --window keeps (4)
        adapter: the file of a trained state, RUN/adapter.safetensors of mnemos linearise
        system: the system message (the template's own)
        length: most tokens of an answer
        temperature: 0: the most probable token
        top_k: draw from the k most probable (0: all)
        top_p: draw from the most probable tokens of this total probability
        seed: random seed
        trust_remote_code: run the Python code that the model brings, which can do whatever you can
    """
    # --- options out of range, before the model is loaded ---
    least = {"length": (length, 1), "temperature": (temperature, 0), "top-k": (top_k, 0), "window": (window, 1)}
    for name, (value, bound) in {**least, "sinks": (sinks, 0)}.items():
        if value is not None and not value >= bound:
            raise InputError(f"--{name}: expected at least {bound}, found {value}; raise it")
    if not 0 < top_p <= 1:
        raise InputError(f"--top-p: expected more than 0 and at most 1, found {top_p}; change it")
    if window is None and sinks is not None:
        raise InputError(f"--sinks: expected --window beside it, found {sinks} alone; add --window N")
    sinks = 4 if sinks is None else sinks
    if window is not None and sinks >= window:
        raise InputError(f"--sinks: expected less than the window of {window}, found {sinks}; raise --window")
    if window is not None and adapter is not None:
        raise InputError(f"--window: expected no --adapter, which has its own, found {adapter}; leave one out")
    if adapter is not None and not adapter.is_file():
        raise InputError(f"--adapter: expected RUN/adapter.safetensors of mnemos linearise, found no file {adapter}")

    import torch

    from mnemos.hosts.linearise import RECORD, linearise, merge_updates
    from mnemos.hosts.linearised_file import load_adapter
    from mnemos.lab.hosted.hub import language_model

    model, tokenizer = language_model(folder, trust_remote_code)
    if window is not None:
        if hasattr(model.config, RECORD):
            raise InputError(f"--window: expected a decoder without a state, found {folder} linearised; leave it out")
        linearise(model, window=window, sinks=sinks, state="none")
    if adapter is not None:
        load_adapter(model, adapter)
        if any(".linearised.updates." in name for name, _ in model.named_parameters()):
            merge_updates(model)
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    talk = Chat(model, Turns(tokenizer, system), length, {**drawn, "generator": torch.Generator().manual_seed(seed)})
    with on_ctrl_c(signal.default_int_handler):
        Terminal(talk).run()
    return 0


class Turns:
    """The tokens of a turn: those of the tokenizer's chat template, or of plain text where it has none.

    A template renders a whole chat. What it writes between two answers is always the same, so a turn is rendered after
    a mark in place of the answer, and only what follows the mark is read.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = bool(getattr(tokenizer, "chat_template", None))
        if system is not None and not self.template:
            raise InputError("--system: expected a tokenizer with a chat template, found none; leave it out")
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.ends = {tokenizer.eos_token_id} - {None}
        if self.template:  # the template's own end of an answer
            self.ends |= {*self._encode(self._after_answer("."))[:1]} & {*tokenizer.all_special_ids}

    def first(self, text: str) -> list[int]:
        """The tokens [T] of a chat that begins with this turn, to where the answer begins."""
        if not self.template:
            return list(self.tokenizer(text)["input_ids"])
        return self._encode(self._render([*self.system, {"role": "user", "content": text}]))

    def following(self, text: str, last: int) -> list[int]:
        """The tokens of a turn after an answer whose last token is `last`: its end, if it has none, and the turn."""
        tokens = self._encode(self._after_answer(text) if self.template else f"\n{text}")
        return tokens[1:] if tokens[:1] == [last] else tokens

    def _after_answer(self, text: str) -> str:
        turns = [("user", "."), ("assistant", _MARK), ("user", text)]
        whole = self._render([*self.system, *({"role": role, "content": content} for role, content in turns)])
        return whole.partition(_MARK)[2]

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise InputError(
                f"chat template: expected one of system, user and assistant messages, found one that refuses them "
                f"({error}); leave --system out, or change tokenizer.chat_template"
            ) from None

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class Answer(NamedTuple):
    """What a turn has cost: tokens read and written, and seconds of both."""

    read: int
    written: int
    reading: float
    writing: float


class Chat:
    """A chat: the stream after all turns, the streams to go back to, and those with a name.

    model: of Transformers, in eval mode. length: the most tokens of an answer. drawn: settings of `Stream.tokens`.
    Raises InputError for a model without a causal state.
    """

    def __init__(self, model: Any, turns: Turns, length: int, drawn: dict[str, Any]) -> None:
        from mnemos import Stream
        from mnemos.hugging_face import MnemosForCausalLM, functional

        self.tokenizer, self.turns, self.length, self.drawn = turns.tokenizer, turns, length, drawn
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.ends = sorted(turns.ends | {*(ends if isinstance(ends, list) else [ends])} - {None})
        self.new = Stream(model.model if isinstance(model, MnemosForCausalLM) else functional(model))
        self.stream: Stream = self.new
        self.before: deque[Stream] = deque(maxlen=_TURNS)
        self.named: dict[str, Stream] = {}

    @property
    def state_bytes(self) -> int:
        from mnemos.types import leaves

        return sum(x.numel() * x.element_size() for x in leaves(self.stream.state))

    def answer(self, text: str, put: Callable[["torch.Tensor"], None], stopped: Callable[[], bool]) -> Answer | None:
        """Read a turn and answer it; None if `stopped` while it was read, which leaves the chat as it was.

        put: is given each token [1] of the answer. stopped: asked after each; the answer then ends with that token.
        """
        import torch

        start, stream = time.perf_counter(), self.stream
        last = None if stream.last is None else int(stream.last)
        tokens = self.turns.first(text) if last is None else self.turns.following(text, last)
        for part in torch.tensor([tokens]).split(_PIECE, 1):
            stream = stream.prefill(part)
            if stopped():
                return None
        reading, count = time.perf_counter() - start, 0
        drawn = stream.tokens(self.length, **self.drawn, eos=self.ends or None)
        for token in drawn:
            count += 1
            if token.item() not in self.ends:
                put(token)
            if stopped():
                break
        self.go(drawn.stream)
        return Answer(len(tokens), count, reading, time.perf_counter() - start - reading)

    def go(self, stream: "Stream") -> None:
        """Go on from a stream; `back` undoes it."""
        self.before.append(self.stream)
        self.stream = stream

    def command(self, name: str, value: str) -> None:
        """What a line /NAME VALUE does to the stream. Raises InputError for one that is unknown or comes too early."""
        match name, value:
            case "fork" | "save" | "load", "":
                raise InputError(f"/{name}: expected {'a name' if name == 'fork' else 'a file'}, found none; add it")
            case "fork", _:
                self.named[value] = self.stream
            case "new", _:
                self.go(self.new)
            case "back", "" if self.before:
                self.stream = self.before.pop()
            case "back", "":
                raise InputError("/back: expected a turn to take back, found none; /fork NAME keeps a chat for longer")
            case "back", _ if value in self.named:
                self.go(self.named[value])
            case "back", _:
                known = ", ".join(sorted(self.named)) or "none; /fork NAME makes one"
                raise InputError(f"/back: expected the name of a fork, found {value!r}; known: {known}")
            case "save", _ if self.stream.last is None:
                raise InputError("/save: expected a chat that has begun, found a new one; write something first")
            case "save", _:
                self.stream.save(value)
            case "load", _:
                loaded = type(self.new).restore(self.new.model, value, self.new.step)
                if loaded.rows != 1:
                    raise InputError(
                        f"/load: expected a chat, which is one row, found {loaded.rows} rows; name another"
                    )
                self.go(loaded)
            case _:
                raise InputError(f"expected a command of the chat, found {f'/{name}'!r:.40}; /help lists them")


class Terminal:
    """Reads turns and commands, a line each, and shows answers as they come; costs and errors go to standard error."""

    def __init__(self, talk: Chat) -> None:
        from rich.console import Console

        self.talk = talk
        self.terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):  # else a wrong byte would end the chat, and all that was forked
            sys.stdin.reconfigure(errors="surrogateescape")
        self.notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def run(self) -> None:
        if self.terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() then edits lines and remembers them
            self.note("/help lists the commands")
        if not self.talk.turns.template:
            self.note("the tokenizer has no chat template: the model continues the text")
        while (line := self.read()) is not None and line.split()[:1] != ["/quit"]:
            try:
                if wrong := next((c for c in line if "\ud800" <= c <= "\udfff"), ""):
                    code = getattr(sys.stdin, "encoding", None) or "UTF-8"
                    raise InputError(f"expected text in {code}, found the byte 0x{ord(wrong) & 0xFF:02x}; convert it")
                if line.split()[:1] == ["/help"]:
                    self.note(HELP)
                elif line.startswith("/"):
                    name, _, value = line[1:].partition(" ")
                    self.talk.command(name, value.strip())
                    self.note(f"{line}: state {_size(self.talk.state_bytes)}")
                elif line:
                    self.answer(line)
            except InputError as error:
                self.note(f"mnemos: {error}", "")

    def read(self) -> str | None:
        """The next line; None at the end. On a terminal, Ctrl-C drops what was typed."""
        while True:
            try:
                return input("> " if self.terminal else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                self.note("\n/quit or Ctrl-D ends the chat")

    def answer(self, text: str) -> None:
        from mnemos.libraries import transformers

        shown = transformers().TextStreamer(self.talk.tokenizer, skip_special_tokens=True)
        shown.on_finalized_text = lambda text, stream_end=False: say(text, end="\n" * stream_end, flush=True)
        asked: list[int] = []
        with on_ctrl_c(lambda number, frame: asked.append(number)):
            cost = self.talk.answer(text, shown.put, lambda: bool(asked))
        if cost is None:
            self.note("interrupted: the turn was not read")
            return
        shown.end()
        speed = f"{cost.written / cost.writing:,.1f} tokens/s" if cost.writing else ""
        size = "grows" if getattr(self.talk.new.model, "state_kind", "growing") == "growing" else "constant"
        self.note(
            f"[read {cost.read:,} tokens in {cost.reading:.1f} s, wrote {cost.written:,} at {speed}; "
            f"state {_size(self.talk.state_bytes)}, {size}]"
        )

    def note(self, text: str, style: str = "dim") -> None:
        self.notes.print(printable(text), style=style)


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


@contextlib.contextmanager
def on_ctrl_c(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Inside the `with`, Ctrl-C calls the handler, unless the program was started with Ctrl-C ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
