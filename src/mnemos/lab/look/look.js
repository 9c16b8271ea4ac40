"use strict";
// The viewer of recordings (pack.py): a document segment by segment, what each memory did, and what predictions need.
(() => {
  const NAN = 255, LEVELS = 254, TOP = 8;
  const runs = [...document.querySelectorAll("script.look-run")].map((one) => JSON.parse(one.textContent));
  const root = document.getElementById("look");

  // --- elements: made with text, never from markup, so that what a data set holds cannot become an element ---

  function make(tag, settings = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(settings)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "class") element.className = value;
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }
  const note = (...children) => make("p", { class: "note" }, ...children);
  const row = (...children) => make("div", { class: "row" }, ...children);
  const labelled = (...children) => make("label", {}, ...children);
  const option = (name, value) => make("option", { value }, name);
  const bar_list = (more = "") => make("ul", { class: "look-bars" + more });
  const section = (memory, ...children) =>
    make("section", { class: "look-memory", "aria-label": memory.name }, make("h3", {}, memory.name), ...children);

  /** At most so many decimals and four significant digits; halves go to the even digit, as in the page's tables. */
  function number(x, digits = 2) {
    if (x == null || Number.isNaN(x)) return "–";
    const four = Number(x.toPrecision(4)), whole = Math.trunc(Math.abs(four)).toString().length;
    const places = Math.min(digits, Math.max(0, 4 - whole)), exact = whole > 4 ? four : x;
    const half = (Math.abs(exact) * 10 ** places) % 2 === 0.5; // below it is an even digit
    return (half ? exact * (1 - Number.EPSILON) : exact).toFixed(places).replace("-", "−");
  }

  // A list of names with bars and numbers: rows of [name, size, text of the number].
  function bars(list, rows, most) {
    while (list.children.length < rows.length) list.append(make("li", {}, make("span"), make("s"), make("em")));
    [...list.children].forEach((item, i) => {
      item.hidden = i >= rows.length;
      if (i >= rows.length) return;
      const [name, size, text] = rows[i];
      item.children[0].textContent = name;
      item.children[1].style.cssText = `--v:${Math.round((100 * size) / (most || 1))}%`;
      item.children[2].textContent = text ?? number(size);
    });
  }

  // --- arrays: {shape, most, bytes}, decoded when they are first used; with `top`, the largest of the last axis ---

  function bytes(text) {
    const raw = atob(text), data = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) data[i] = raw.charCodeAt(i);
    return data;
  }
  function open(array) {
    if (!array.data) {
      array.data = bytes(array.bytes);
      delete array.bytes;
      if (array.top) {
        const places = bytes(array.places);
        array.at = array.wide === 1 ? places : new Uint16Array(places.buffer);
        delete array.places;
      }
    }
    return array.data;
  }
  function value(array, index) {
    const level = open(array)[index];
    return level === NAN ? NaN : (level / LEVELS) * array.most;
  }
  /** The last axis of an array [S, A, B] at (s, a), into `out`. */
  function slice(array, s, a, out) {
    const [, count, width] = array.shape, data = open(array), first = s * count + a;
    const size = array.top || width;
    out.fill(0, 0, width);
    for (let i = first * size; i < (first + 1) * size; i++)
      out[array.top ? array.at[i] : i - first * size] = (data[i] / LEVELS) * array.most;
    return out;
  }
  /** How much token i of segment s read of a unit. */
  function reading(memory, s, i, unit) {
    const [, count, width] = memory.readers.shape;
    if (!memory.readers.top) return value(memory.readers, (s * count + i) * width + unit);
    return slice(memory.readers, s, i, scratch)[unit];
  }

  // --- what is shown, and the words of its document ---

  const state = { run: 0, segment: 0, memory: -1, unit: -1, word: -1, prediction: 0, alone: false, playing: 0 };
  const ui = {};
  const run = () => runs[state.run];
  const segments = (one) => Math.ceil(one.count / one.length);
  const weights = runs.flatMap((one) => one.memories).flatMap((one) => [one.written, one.readers]);
  const scratch = new Float32Array(Math.max(1, ...weights.map((array) => array?.shape[2] ?? 0)));

  // The words of a run with the tokens that they begin at, and the word of each token.
  function words(one) {
    if (one.starts) return one;
    one.starts = new Uint32Array(one.words.length + 1);
    one.wordOf = new Uint32Array(one.count + 1);
    let at = 0;
    one.words.forEach((_, i) => {
      one.starts[i] = at;
      const next = at + (one.counts ? one.counts[i] : 1);
      for (; at < next; at++) one.wordOf[at] = i;
    });
    one.starts[one.words.length] = at;
    one.wordOf[one.count] = one.words.length;
    one.spaced = !one.words.some((word) => /\s/.test(word[0] ?? "") || /\s$/.test(word));
    return one;
  }
  const shown = (word) => (word === "" ? "␣" : word);
  const trimmed = (word) => word.trim() || "␣";
  const word_at = (one, token) => trimmed(one.words[one.wordOf[token]]);

  // --- the controls, and what they do ---

  function build() {
    const models = runs.map((one, i) => {
      const choice = make("input", { type: "radio", name: "look-model", value: i, onchange: () => open_run(i) });
      choice.checked = i === state.run;
      return labelled(choice, " " + one.name);
    });
    const step = (label, text, by) =>
      make("button", { type: "button", "aria-label": label, onclick: () => go(state.segment + by) }, text);
    ui.slider = make("input", {
      type: "range", min: 1, max: 1, value: 1, "aria-label": "segment", oninput: () => go(+ui.slider.value - 1),
    });
    ui.output = make("output", {});
    ui.play = make("button", { type: "button", "aria-pressed": "false", onclick: play }, "▶ play");
    const bar = make("div", { class: "look-bar", role: "group", "aria-label": "segment and model" },
      ...(runs.length > 1 ? [make("fieldset", {}, make("legend", {}, "model"), ...models)] : []),
      step("the segment before", "◀", -1), ui.slider, step("the next segment", "▶", 1), ui.play, ui.output);

    ui.memory = make("select", {
      "aria-label": "memory that shades the text", onchange: () => choose(+ui.memory.value, -1),
    });
    ui.unit = make("select", {
      "aria-label": "unit that shades the text", onchange: () => choose(state.memory, +ui.unit.value),
    });
    ui.text = make("div", {
      class: "look-text", role: "listbox", tabindex: "0",
      "aria-label": "the words of the segment: arrow keys choose one", onkeydown: on_text_key, onclick: on_text_click,
    });
    const key = (name) => make("i", { class: `look-key ${name}` });
    const legend = note(key("w"), "written to the memory; ", key("r"),
      "read from it; of earlier words: how much they are attended to. Faint: words of the segments before.");
    ui.word = make("div", { "aria-live": "polite" });
    ui.panels = make("div", {});
    ui.prediction = make("div", {});
    const left = make("div", {}, make("h3", {}, "The text"),
      row(labelled("shaded by ", ui.memory), labelled("part ", ui.unit)), ui.text, legend, ui.panels);
    const columns = make("div", { class: "look-columns" }, left, make("div", {}, ui.prediction, ui.word));
    root.replaceChildren(make("div", { class: "look" }, bar, columns));
    root.addEventListener("keydown", on_key);
  }

  function on_key(event) {
    if (event.target.matches("input, select, .look-text")) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(state.segment + step);
  }

  function open_run(i) {
    const before = run();
    state.run = i;
    const one = words(run());
    if (before !== one) state.segment = Math.min(state.segment, segments(one) - 1);
    state.word = -1;
    state.prediction = 0;
    ui.slider.max = segments(one);
    ui.memory.replaceChildren(...one.memories.map((memory, m) => option(memory.name, m)));
    ui.pool = [];
    ui.text.replaceChildren();
    const panel = (memory) => (memory.units.length ? unit_panel : memory.received ? window_panel : plain_panel);
    ui.memories = one.memories.map((memory, m) => panel(memory)(one, memory, m));
    ui.panels.replaceChildren(...ui.memories.map((panel) => panel.element));
    build_prediction(one);
    for (const panel of ui.memories) panel.paint();
    const first = Math.max(0, one.memories.findIndex((memory) => memory.units.length));
    choose(one.memories.length ? first : -1, -1);
  }

  function choose(memory, unit) {
    state.memory = memory;
    state.unit = unit;
    const one = run().memories[memory];
    if (one) {
      ui.memory.value = memory;
      const all = option(one.units.length ? "all of it" : "the whole window", -1);
      ui.unit.replaceChildren(all, ...one.units.map(option));
      ui.unit.value = unit;
      ui.unit.disabled = !one.units.length;
    }
    for (const panel of ui.memories) panel.select();
    draw();
  }

  function go(segment) {
    const next = Math.max(0, Math.min(segments(run()) - 1, segment));
    if (next === state.segment) return;
    state.word = -1;
    state.segment = next;
    draw();
  }

  function play() {
    if (state.playing) {
      clearInterval(state.playing);
      state.playing = 0;
    } else {
      if (state.segment === segments(run()) - 1) go(0);
      state.playing = setInterval(() => {
        go(state.segment + 1);
        if (state.segment === segments(run()) - 1) play();
      }, 250);
    }
    ui.play.textContent = state.playing ? "■ stop" : "▶ play";
    ui.play.setAttribute("aria-pressed", String(!!state.playing));
  }

  function draw() {
    const one = run(), s = state.segment, total = segments(one);
    const from = s * one.length, to = Math.min(one.count, from + one.length);
    const text = `segment ${s + 1} of ${total}, tokens ${from + 1} to ${to}`;
    ui.slider.value = s + 1;
    ui.slider.setAttribute("aria-valuetext", text);
    ui.output.textContent = text;
    draw_text(one);
    for (const panel of ui.memories) panel.update();
    draw_word(one);
    if (ui.effects) ui.effects();
    if (!ui.asked) return;
    const last = one.asked ? one.asked.after.findLastIndex((after) => after <= to) : -1;
    if (!one.asked) ui.asked.textContent = "";
    else if (last < 0) ui.asked.textContent = "Nothing has been told yet.";
    else {
      const p = number(one.asked.p[last], 3);
      ui.asked.textContent = `Asked after token ${one.asked.after[last]}, the answer would have probability ${p}.`;
    }
  }

  // --- the text: words shaded by what was written of them and read by them ---

  // Shades of the tokens of the segment and of those before it, 0 to 1.
  const longest = Math.max(1, ...runs.map((one) => one.count));
  const written = new Float32Array(longest), read = new Float32Array(longest);
  function shade(one, first, end) {
    written.fill(0, 0, end - first);
    read.fill(0, 0, end - first);
    const memory = one.memories[state.memory];
    if (!memory) return;
    const s = state.segment, from = s * one.length, count = Math.min(one.length, one.count - from);
    if (memory.written)
      for (const u of state.unit < 0 ? memory.units.keys() : [state.unit]) {
        slice(memory.written, s, u, scratch);
        for (let i = 0; i < count; i++) {
          const at = from + i - memory.offset - first;
          const share = memory.written.most ? scratch[i] / memory.written.most : 0;
          if (at >= 0) written[at] = Math.max(written[at], share);
        }
      }
    if (state.unit >= 0 && memory.readers)
      for (let i = 0; i < count; i++) read[from + i - first] = reading(memory, s, i, state.unit);
    else
      for (const [source, part] of memory.sources) {
        const share = one.sources[source].share, width = share.shape[1];
        for (let i = 0; i < count; i++)
          read[from + i - first] += (value(share, (from + i) * width + part) || 0) / memory.sources.length;
      }
    if (memory.received) {
      const width = memory.received.shape[1], reach = width - one.length;
      for (let i = 0; i < reach; i++) {
        const at = from - reach + i - first;
        const share = memory.received.most ? value(memory.received, s * width + i) / memory.received.most : 0;
        if (at >= 0) read[at] = share;
      }
    }
  }

  function draw_text(one) {
    const from = state.segment * one.length, to = Math.min(one.count, from + one.length);
    const memory = one.memories[state.memory];
    const reach = memory?.received ? Math.min(2 * one.length, memory.received.shape[1] - one.length) : 0;
    const first = Math.max(0, from - Math.max(one.length, memory ? memory.offset : 0, reach));
    shade(one, first, to);
    const begin = one.wordOf[first], count = one.wordOf[to - 1] + 1 - begin;
    while (ui.pool.length < count) {
      const span = make("span", { role: "option", id: "look-word-" + ui.pool.length });
      ui.pool.push(span);
      ui.text.append(span, one.spaced ? " " : "");
    }
    ui.first = begin;
    ui.count = count;
    ui.pool.forEach((span, i) => {
      span.hidden = i >= count;
      if (i >= count) return;
      const w = begin + i, at = Math.max(first, one.starts[w]), until = Math.min(to, one.starts[w + 1]);
      const most = (shades) => Math.round(100 * Math.max(0, ...shades.subarray(at - first, until - first)));
      if (span.textContent !== shown(one.words[w])) span.textContent = shown(one.words[w]);
      span.style.cssText = `--w:${most(written)}%;--r:${most(read)}%`;
      const told = one.told && at >= one.told[0] && at < one.told[1];
      span.className = (at < from ? "past" : "") + (told ? " told" : "") + (w === state.word ? " chosen" : "");
      span.setAttribute("aria-selected", String(w === state.word));
    });
    const chosen = state.word - begin;
    if (chosen >= 0 && chosen < count) ui.text.setAttribute("aria-activedescendant", "look-word-" + chosen);
    else ui.text.removeAttribute("aria-activedescendant");
  }

  function on_text_click(event) {
    const i = ui.pool.indexOf(event.target);
    if (i < 0) return;
    state.word = ui.first + i;
    draw();
  }
  function on_text_key(event) {
    const one = run(), from = one.wordOf[state.segment * one.length], end = ui.first + ui.count;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 }[event.key];
    const page = { PageUp: -1, PageDown: 1 }[event.key];
    if (!step && !page) return;
    event.preventDefault();
    if (page) return go(state.segment + page);
    state.word = state.word < 0 ? from : Math.max(ui.first, Math.min(end - 1, state.word + step));
    draw();
  }

  // --- what the chosen word read ---

  function colour_of(part) {
    if (part === "this segment" || part === "the attention") return "color-mix(in srgb, var(--muted) 55%, transparent)";
    if (/window|before|first words/.test(part)) return "color-mix(in srgb, var(--variant-4) 75%, transparent)";
    return "color-mix(in srgb, var(--negative) 85%, transparent)";
  }

  function draw_word(one) {
    const last = one.wordOf[Math.min(one.count, (state.segment + 1) * one.length) - 1];
    const w = state.word >= 0 ? state.word : last;
    const t = Math.min(one.starts[w + 1], one.count) - 1, s = Math.floor(t / one.length);
    const hint = state.word < 0 ? "The last word of the segment; click or choose another. " : "";
    const parts = [make("h3", {}, `What “${trimmed(one.words[w])}” read`),
      note(hint + "The shares of each layer's sources, in the order of the bar.")];
    for (const source of one.sources) {
      const share = source.parts.map((_, i) => value(source.share, t * source.parts.length + i));
      const text = source.parts.map((part, i) => `${part} ${number(share[i])}`).join(", ");
      const stack = make("div", { class: "look-stack", "aria-hidden": "true" }, ...share.map((x, i) => {
        const bar = make("s");
        bar.style.cssText = `width:${(x || 0) * 100}%;background:${colour_of(source.parts[i])}`;
        return bar;
      }));
      parts.push(make("div", {}, make("div", { class: "note" }, `${source.name}: ${text}`)), stack);
    }
    for (const memory of one.memories.filter((memory) => memory.readers)) {
      const units = memory.units.map((name, u) => [name, reading(memory, s, t - s * one.length, u)]);
      const best = units.sort((a, b) => b[1] - a[1]).slice(0, TOP).filter((unit) => unit[1] > 0);
      if (!best.length) continue;
      const list = bar_list();
      bars(list, best, best[0][1]);
      parts.push(note(`${memory.name}: how much it read of each ${UNIT[memory.kind] ?? "slot"}`), list);
    }
    const p = value(one.p, t);
    const others = one.emptied.map(
      (other) => `, ${number(value(other.p, t))} with the ${other.kind} emptied before this segment`,
    );
    if (!Number.isNaN(p)) parts.push(make("p", {}, `Its probability was ${number(p)}${others.join("")}.`));
    ui.word.replaceChildren(...parts);
  }

  // --- pictures of arrays ---

  // A picture of rows × columns, one pixel each, that the page enlarges.
  function picture(canvas, columns, rows, level, colour) {
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
    const [r, g, b] = rgb(colour);
    for (let y = 0; y < rows; y++)
      for (let x = 0; x < columns; x++) {
        const v = level(x, y), alpha = Number.isNaN(v) ? 0 : Math.round(255 * Math.max(0, Math.min(1, v)));
        image.data.set([r, g, b, alpha], 4 * (y * columns + x));
      }
    context.putImageData(image, 0, 0);
  }
  function rgb(name) {
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => {
    for (const panel of [...(ui.memories ?? []), ui.trace].filter(Boolean)) panel.paint();
  });

  // A picture with a mark of the segment (`now`) and of a unit (`row`); a click calls on_point with its x, y in [0, 1].
  function strip(label, on_point) {
    const canvas = make("canvas", { role: "img", "aria-label": label });
    const now = make("i"), row = make("b", { hidden: true });
    const box = make("div", { class: "look-strip" }, canvas, row, now);
    box.addEventListener("pointerdown", (event) => {
      const place = box.getBoundingClientRect();
      on_point((event.clientX - place.left) / place.width, (event.clientY - place.top) / place.height);
    });
    return { box, canvas, now, row };
  }
  function mark(heat, column, columns) {
    heat.now.style.cssText = `left:${(100 * column) / columns}%;width:${100 / columns}%`;
    heat.now.hidden = column < 0 || column >= columns;
  }
  const axis = (...parts) => make("div", { class: "look-axis" }, ...parts.map((part) => make("span", {}, part)));

  // --- a panel for each memory: { element, paint, select, update } ---

  const CURVES = {
    moved: "how far it moved", read: "how much it was read", keeps: "how much it kept itself",
    update: "update gate", reset: "reset gate",
    candidate: "distance of the candidate", strength: "strength of the direction",
  };
  const UNIT = { sums: "direction", tokens: "memory token" };

  // Of a memory whose part in the shares of sources is all that was recorded.
  function plain_panel(one, memory) {
    return { element: section(memory, note(memory.about)), paint() {}, select() {}, update() {} };
  }

  function unit_panel(one, memory, m) {
    const count = memory.units.length, total = segments(one), names = Object.keys(memory.curves);

    // What all units did, a row each.
    const curve = make("select", { "aria-label": `curve of ${memory.name}`, onchange: () => paint() },
      ...names.map((name) => option(CURVES[name] ?? name, name)));
    curve.value = memory.curves.keeps ? "read" : names.includes("strength") ? "strength" : names[0];
    const about = `${memory.name}: a row for each of ${count} units, a column for each of ${total} segments`;
    const heat = strip(about, (x, y) => {
      choose(m, Math.min(count - 1, Math.floor(y * count)));
      go(Math.floor(x * total));
    });
    heat.canvas.style.height = `${Math.max(3, Math.min(14, 320 / count)) * count}px`;
    if (one.told) {
      const line = make("u", { title: "told here" });
      line.style.left = `${(100 * (one.told[0] / one.length)) / total}%`;
      heat.box.append(line);
    }
    const scale = note();

    // What one unit did.
    const units = make("select", { "aria-label": `unit of ${memory.name}`, onchange: () => choose(m, +units.value) },
      option("choose one", -1), ...memory.units.map(option));
    const values = note(), heard = bar_list(" written"), none = make("p", {}, "None recorded."), ever = row();
    const detail = make("div", { hidden: true }, values,
      note("Words that it took most from in this segment's step:"), heard, none,
      note("In the whole text, up to 12 words that it took most from, one a segment (a button goes there):"), ever);
    const element = section(memory, note(memory.about),
      row(labelled("shading shows ", curve), labelled("unit: ", units)), heat.box,
      axis("segment 1", one.told ? "dotted: told here" : "", `segment ${total}`), scale, detail);

    function paint() {
      const array = memory.curves[curve.value], colour = curve.value === "read" ? "--negative" : "--positive";
      picture(heat.canvas, total, count, (x, y) => value(array, x * count + y) / (array.most || 1), colour);
      scale.textContent = `A row is a ${UNIT[memory.kind] ?? "slot"}, a column a segment; from no colour, 0, to full ` +
        `colour, ${number(array.most, 3)}: ${CURVES[curve.value] ?? curve.value}.`;
    }
    function select() {
      const mine = state.memory === m && state.unit >= 0;
      units.value = mine ? state.unit : -1;
      detail.hidden = heat.row.hidden = !mine;
      if (!mine) return;
      heat.row.style.cssText = `top:${(100 * state.unit) / count}%;height:${100 / count}%`;
      ever.replaceChildren(...most_written(one, memory, state.unit).map(([t, weight]) => {
        const show = () => {
          go(Math.floor((t + memory.offset) / one.length));
          state.word = one.wordOf[t];
          draw();
        };
        return make("button", { type: "button", title: `weight ${number(weight)}`, onclick: show }, word_at(one, t));
      }));
    }
    function update() {
      mark(heat, state.segment, total);
      if (detail.hidden) return;
      const s = state.segment, at = s * count + state.unit;
      const texts = names.map((name) => `${CURVES[name] ?? name} ${number(value(memory.curves[name], at), 3)}`);
      values.textContent = `${memory.units[state.unit]}, segment ${s + 1}: ${texts.join("; ")}`;
      heard.hidden = !memory.written;
      if (!memory.written) return;
      slice(memory.written, s, state.unit, scratch);
      const from = s * one.length - memory.offset, rows = [];
      for (let i = 0; i < one.length && s * one.length + i < one.count; i++)
        if (scratch[i] > 0 && from + i >= 0) rows.push([word_at(one, from + i), scratch[i]]);
      rows.sort((a, b) => b[1] - a[1]);
      bars(heard, rows.slice(0, TOP), memory.written.most);
      none.hidden = rows.length > 0;
    }
    return { element, paint, select, update };
  }

  function most_written(one, memory, unit) {
    if (!memory.written) return [];
    const tokens = [];
    for (let s = 0; s < segments(one); s++) {
      slice(memory.written, s, unit, scratch);
      let best = -1;
      for (let i = 0; i < one.length && s * one.length + i < one.count; i++)
        if (scratch[i] > (best < 0 ? 0 : scratch[best])) best = i;
      const t = s * one.length + best - memory.offset;
      if (best >= 0 && t >= 0) tokens.push([t, scratch[best]]);
    }
    return tokens.sort((a, b) => b[1] - a[1]).slice(0, 12).sort((a, b) => a[0] - b[0]);
  }

  function window_panel(one, memory, m) {
    const total = segments(one), width = memory.received.shape[1], reach = width - one.length;
    // Without weights on the segment's own words it has earlier words alone.
    const own = open(memory.received).some((level, i) => level && i % width >= reach);
    const tall = own || !reach ? width : reach, rows = Math.min(64, tall);
    const about = `${memory.name}: attention by distance, a column for each of ${total} segments`;
    const heat = strip(about, (x) => {
      choose(m, -1);
      go(Math.floor(x * total));
    });
    heat.canvas.style.height = `${Math.max(64, rows * 2)}px`;
    const list = bar_list(), heading = note("Earlier words that this segment attends to most:");
    const where = tall === width ? "up to its end" : "before it";
    const greatest = tall > rows ? ", of the tokens of a row the greatest" : "";
    const text = `${memory.about} A column is a segment; in it, the ${tall} tokens ${where}, the oldest on top; from ` +
      `no colour, 0, to full blue, ${number(memory.received.most, 3)}: attention to the token${greatest}.`;
    const ends = axis("segment 1", `segment ${total}`);
    const element = section(memory, note(text), heat.box, ends, heading, list);
    function paint() {
      picture(heat.canvas, total, rows, (x, y) => {
        const first = Math.floor((y * tall) / rows), end = Math.max(first + 1, Math.floor(((y + 1) * tall) / rows));
        let most = 0;
        for (let i = first; i < end; i++) most = Math.max(most, value(memory.received, x * width + i));
        return most / (memory.received.most || 1);
      }, "--negative");
    }
    function update() {
      mark(heat, state.segment, total);
      const s = state.segment, from = s * one.length - reach, earlier = [];
      for (let i = 0; i < reach; i++) {
        const x = value(memory.received, s * width + i);
        if (from + i >= 0 && x > 0) earlier.push([word_at(one, from + i), x, number(x, 3)]);
      }
      earlier.sort((a, b) => b[1] - a[1]);
      heading.hidden = !earlier.length;
      bars(list, earlier.slice(0, TOP), earlier.length ? earlier[0][1] : 1);
    }
    return { element, paint, select() {}, update };
  }

  // --- what a prediction needs: its probability with parts of the memory emptied ---

  function build_prediction(one) {
    ui.trace = ui.effects = null;
    if (!one.predictions.length) return ui.prediction.replaceChildren();
    const show = () => {
      state.prediction = +places.value;
      build_trace(one);
      draw();
    };
    const places = make("select", { "aria-label": "word that is predicted", onchange: show },
      ...one.predictions.map((prediction, i) => {
        const before = word_at(one, prediction.token - 1), segment = Math.ceil(prediction.token / one.length);
        return option(`“${trimmed(prediction.answer)}” after “${before}” (segment ${segment})`, i);
      }));
    ui.about = make("p", {});
    ui.asked = make("p", {});
    ui.holder = make("div", {});
    const choice = make("label", { class: "row" }, "prediction of ", places);
    ui.prediction.replaceChildren(make("h3", {}, "What a prediction needs"), choice, ui.about, ui.asked, ui.holder);
    build_trace(one);
  }

  function mean_of(values) {
    const known = values.filter((x) => x != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 1;
  }

  function build_trace(one) {
    const prediction = one.predictions[state.prediction], boundaries = prediction.boundaries;
    const answer = trimmed(prediction.answer), columns = boundaries.length;
    const guess = prediction.guess === prediction.answer ? ", the most of all."
      : `; the likeliest is “${trimmed(prediction.guess)}” with ${number(prediction.certainty, 3)}.`;
    ui.about.textContent = `As read, “${answer}” has probability ${number(prediction.p, 3)}${guess}`;
    ui.trace = ui.effects = null;
    if (one.asked && !one.asked.known)
      return ui.holder.replaceChildren(note("The answer is not known at the end, so nothing was emptied."));
    if (!columns) return ui.holder.replaceChildren(note("No segment comes before it, so nothing was emptied."));

    // The units that matter first: those without which the answer is lost, or those that keep it alone.
    const whole = prediction.effects.filter((effect) => effect.unit == null && !effect.alone);
    const units = prediction.effects.filter((effect) => effect.unit != null);
    const lone = units.some((effect) => effect.alone);
    if (!lone) state.alone = false;
    const level = (effect) => Math.round(20 * mean_of(effect.p)) * (state.alone ? -1 : 1);
    const sorted = units.filter((effect) => effect.alone === state.alone).sort((a, b) => level(a) - level(b));
    const rows = [...(state.alone ? [] : whole), ...sorted];

    const choice = (name, alone) => {
      const input = make("input", { type: "radio", name: "look-alone", onchange: () => {
        state.alone = alone;
        build_trace(one);
        draw();
      } });
      input.checked = state.alone === alone;
      return labelled(input, name);
    };
    const label = `probability of the answer with a part emptied: a row for each of ${rows.length} parts, a column ` +
      `for each of ${columns} segments before which it is emptied`;
    const heat = strip(label, (x, y) => {
      const effect = rows[Math.min(rows.length - 1, Math.floor(y * rows.length))];
      if (effect.memory != null) choose(effect.memory, effect.unit ?? -1);
      go(boundaries[Math.min(columns - 1, Math.floor(x * columns))]);
    });
    heat.canvas.style.height = `${Math.max(4, Math.min(14, 360 / rows.length)) * rows.length}px`;
    const list = bar_list(), title = note();
    const radios = { class: "row", role: "radiogroup", "aria-label": "what is done to a unit" };
    const region = { role: "region", "aria-label": "probability of the answer by part" };
    const meaning = state.alone
      ? "Each row is a unit, each column a segment before which the other units of its memory are emptied; other " +
        "memories stay."
      : "Each row is a part, each column a segment before which it is emptied.";
    ui.holder.replaceChildren(
      ...(lone ? [make("div", radios, choice(" emptied", false), choice(" kept alone", true))] : []),
      note(one.explained),
      note(`${meaning} From no grey, as read, to full grey: the share of the answer's probability that goes. The ` +
        "rows stand in the order of the list below."),
      heat.box, axis(`segment ${boundaries[0] + 1}`, `segment ${boundaries[columns - 1] + 1}`), title,
      make("div", { class: "look-scroll", tabindex: "0", ...region }, list));

    const paint = () => picture(heat.canvas, columns, rows.length, (x, y) => {
      const p = rows[y].p[x];
      return p == null ? NaN : Math.max(0, 1 - p / (prediction.p || 1));
    }, "--ink");
    paint();
    ui.trace = { paint };
    ui.effects = () => {
      let at = boundaries.indexOf(state.segment);
      mark(heat, at, columns);
      if (at < 0) at = state.segment < boundaries[0] ? 0 : columns - 1;
      const what = state.alone ? "kept alone" : "emptied";
      title.textContent = `Probability of “${answer}” if this is ${what} before segment ${boundaries[at] + 1}:`;
      bars(list, rows.map((effect) => [effect.name, effect.p[at] ?? 0, number(effect.p[at])]), 1);
      rows.forEach((effect, i) => {
        // Several memories, or a head, are no part that shades the text.
        const other = effect.unit == null && effect.name !== one.memories[effect.memory]?.name;
        const chosen = !other && effect.memory === state.memory && (effect.unit ?? -1) === state.unit;
        list.children[i].className = chosen ? "chosen" : "";
      });
    };
  }

  // --- the start ---

  // The first model with a memory that knows the answer, and the segment of the word that is asked.
  const knows = (one) => one.memories.some((memory) => memory.units.length) && (!one.asked || one.asked.known);
  state.run = Math.max(0, runs.findIndex(knows));
  if (run().asked) state.segment = segments(run()) - 1;
  build();
  open_run(state.run);
  if (run().asked) {
    state.word = run().words.length - 1;
    draw();
  }
  window.mnemosLook = { go, choose, state, open_run, number, count: () => segments(run()) };
})();
