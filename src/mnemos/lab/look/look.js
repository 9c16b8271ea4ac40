"use strict";
(() => {
  const runs = [...document.querySelectorAll("script.look-run")].map((one) => JSON.parse(one.textContent));
  const root = document.getElementById("look");
  const NAN = 255, LEVELS = 254, TOP = 8;

  // Elements are made with text, never from markup: what a data set holds cannot become an element.
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
  /** At most so many decimals and four significant digits; halves go to the even digit, as in the page's tables. */
  function number(x, digits = 2) {
    if (x == null || Number.isNaN(x)) return "–";
    const four = Number(x.toPrecision(4)), whole = Math.trunc(Math.abs(four)).toString().length;
    const places = Math.min(digits, Math.max(0, 4 - whole)), exact = whole > 4 ? four : x;
    const half = (Math.abs(exact) * 10 ** places) % 2 === 0.5; // below it is an even digit
    return (half ? exact * (1 - Number.EPSILON) : exact).toFixed(places).replace("-", "−");
  }

  // Arrays: {shape, most, bytes}, decoded when they are first used; with `top`, the largest of the last axis.
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
    out.fill(0, 0, width);
    if (array.top) {
      for (let i = 0; i < array.top; i++) out[array.at[first * array.top + i]] = (data[first * array.top + i] / LEVELS) * array.most;
    } else for (let i = 0; i < width; i++) out[i] = (data[first * width + i] / LEVELS) * array.most;
    return out;
  }

  const state = { run: 0, segment: 0, memory: -1, unit: -1, word: -1, prediction: 0, alone: false, playing: 0 };
  const run = () => runs[state.run];
  const segments = (one) => Math.ceil(one.count / one.length);
  const widest = runs.flatMap((one) => one.memories).flatMap((one) => [one.written, one.readers]).map((array) => array?.shape[2] ?? 0);
  const scratch = new Float32Array(Math.max(1, ...widest));

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

  const ui = {};
  function build() {
    const several = runs.length > 1;
    ui.slider = make("input", { type: "range", min: 1, max: 1, value: 1, "aria-label": "segment", oninput: () => go(+ui.slider.value - 1) });
    ui.output = make("output", {});
    ui.play = make("button", { type: "button", "aria-pressed": "false", onclick: play }, "▶ play");
    const models = several
      ? [make("fieldset", {}, make("legend", {}, "model"), ...runs.map((one, i) => {
          const choice = make("input", { type: "radio", name: "look-model", value: i, onchange: () => open_run(i) });
          choice.checked = i === state.run;
          return make("label", {}, choice, " " + one.name);
        }))]
      : [];
    const bar = make("div", { class: "look-bar", role: "group", "aria-label": "segment and model" }, ...models,
      make("button", { type: "button", "aria-label": "the segment before", onclick: () => go(state.segment - 1) }, "◀"),
      ui.slider,
      make("button", { type: "button", "aria-label": "the next segment", onclick: () => go(state.segment + 1) }, "▶"),
      ui.play, ui.output);
    ui.memory = make("select", { "aria-label": "memory that shades the text", onchange: () => choose(+ui.memory.value, -1) });
    ui.unit = make("select", { "aria-label": "unit that shades the text", onchange: () => choose(state.memory, +ui.unit.value) });
    ui.text = make("div", { class: "look-text", role: "listbox", tabindex: "0", "aria-label": "the words of the segment: arrow keys choose one", onkeydown: on_text_key, onclick: on_text_click });
    ui.word = make("div", { "aria-live": "polite" });
    ui.panels = make("div", {});
    ui.prediction = make("div", {});
    const legend = make("p", { class: "note" }, make("i", { class: "look-key w" }), "written to the memory; ", make("i", { class: "look-key r" }), "read from it; of earlier words: how much they are attended to. Faint: words of the segments before.");
    root.replaceChildren(make("div", { class: "look" }, bar, make("div", { class: "look-columns" },
      make("div", {}, make("h3", {}, "The text"), make("div", { class: "row" }, make("label", {}, "shaded by ", ui.memory), make("label", {}, "part ", ui.unit)), ui.text, legend, ui.panels),
      make("div", {}, ui.prediction, ui.word))));
    root.addEventListener("keydown", on_key);
  }

  function on_key(event) {
    if (event.target.matches("input, select, .look-text")) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step) { event.preventDefault(); go(state.segment + step); }
  }

  function open_run(i) {
    const before = run();
    state.run = i;
    const one = words(run());
    if (before !== one) state.segment = Math.min(state.segment, segments(one) - 1);
    state.word = -1;
    state.prediction = 0;
    ui.slider.max = segments(one);
    const first = Math.max(0, one.memories.findIndex((memory) => memory.units.length));
    ui.memory.replaceChildren(...one.memories.map((memory, m) => make("option", { value: m }, memory.name)));
    ui.pool = [];
    ui.text.replaceChildren();
    build_panels(one);
    build_prediction(one);
    for (const panel of ui.memories) panel.paint();
    choose(one.memories.length ? first : -1, -1);
  }

  function choose(memory, unit) {
    state.memory = memory;
    state.unit = unit;
    const one = run().memories[memory];
    if (one) {
      ui.memory.value = memory;
      ui.unit.replaceChildren(make("option", { value: -1 }, one.units.length ? "all of it" : "the whole window"), ...one.units.map((name, u) => make("option", { value: u }, name)));
      ui.unit.value = unit;
      ui.unit.disabled = !one.units.length;
    }
    for (const panel of ui.memories) panel.select();
    draw();
  }

  function go(segment) {
    const next = Math.max(0, Math.min(segments(run()) - 1, segment));
    if (next === state.segment) return;
    if (state.word >= 0) state.word = -1;
    state.segment = next;
    draw();
  }

  function play() {
    if (state.playing) { clearInterval(state.playing); state.playing = 0; }
    else {
      if (state.segment === segments(run()) - 1) go(0);
      state.playing = setInterval(() => {
        go(state.segment + 1);
        if (state.segment === segments(run()) - 1) play();
      }, 250);
    }
    ui.play.textContent = state.playing ? "■ stop" : "▶ play";
    ui.play.setAttribute("aria-pressed", String(!!state.playing));
  }

  // Shades of the tokens of the segment and of those before it: written and read, 0 to 1.
  const longest = Math.max(1, ...runs.map((one) => one.count));
  const written = new Float32Array(longest), read = new Float32Array(longest);
  function shade(one, first, end) {
    written.fill(0, 0, end - first);
    read.fill(0, 0, end - first);
    const memory = one.memories[state.memory];
    if (!memory) return;
    const s = state.segment, from = s * one.length, count = Math.min(one.length, one.count - from);
    if (memory.written) {
      const units = state.unit < 0 ? memory.units.keys() : [state.unit];
      for (const u of units) {
        slice(memory.written, s, u, scratch);
        for (let i = 0; i < count; i++) {
          const at = from + i - memory.offset - first;
          if (at >= 0) written[at] = Math.max(written[at], memory.written.most ? scratch[i] / memory.written.most : 0);
        }
      }
    }
    if (state.unit >= 0 && memory.readers) {
      for (let i = 0; i < count; i++) read[from + i - first] = reading(memory, s, i, state.unit);
    } else {
      for (const [source, part] of memory.sources) {
        const share = one.sources[source].share, width = share.shape[1];
        for (let i = 0; i < count; i++) read[from + i - first] += (value(share, (from + i) * width + part) || 0) / memory.sources.length;
      }
    }
    if (memory.received) {
      const width = memory.received.shape[1], reach = width - one.length;
      for (let i = 0; i < reach; i++) {
        const at = from - reach + i - first;
        if (at >= 0) read[at] = memory.received.most ? value(memory.received, s * width + i) / memory.received.most : 0;
      }
    }
  }
  function reading(memory, s, i, unit) {
    const [, count, width] = memory.readers.shape;
    if (!memory.readers.top) return value(memory.readers, (s * count + i) * width + unit);
    return slice(memory.readers, s, i, scratch)[unit];
  }

  function draw_text(one) {
    const s = state.segment, from = s * one.length, to = Math.min(one.count, from + one.length);
    const memory = one.memories[state.memory];
    const back = Math.max(one.length, memory ? memory.offset : 0, memory && memory.received ? Math.min(2 * one.length, memory.received.shape[1] - one.length) : 0);
    const first = Math.max(0, from - back);
    shade(one, first, to);
    const begin = one.wordOf[first], end = one.wordOf[to - 1] + 1, count = end - begin;
    while (ui.pool.length < count) {
      const span = make("span", { role: "option", id: "look-word-" + ui.pool.length });
      ui.pool.push(span);
      ui.text.append(span, one.spaced ? " " : "");
    }
    ui.first = begin;
    for (let i = 0; i < ui.pool.length; i++) {
      const span = ui.pool[i];
      span.hidden = i >= count;
      if (i >= count) continue;
      const w = begin + i, at = Math.max(first, one.starts[w]), until = Math.min(to, one.starts[w + 1]);
      let most = 0, mean = 0;
      for (let t = at; t < until; t++) { most = Math.max(most, written[t - first]); mean = Math.max(mean, read[t - first]); }
      if (span.textContent !== shown(one.words[w])) span.textContent = shown(one.words[w]);
      span.style.cssText = `--w:${Math.round(most * 100)}%;--r:${Math.round(mean * 100)}%`;
      const told = one.told && at >= one.told[0] && at < one.told[1];
      span.className = (at < from ? "past" : "") + (told ? " told" : "") + (w === state.word ? " chosen" : "");
      span.setAttribute("aria-selected", String(w === state.word));
    }
    const chosen = state.word - begin;
    if (chosen >= 0 && chosen < count) ui.text.setAttribute("aria-activedescendant", "look-word-" + chosen);
    else ui.text.removeAttribute("aria-activedescendant");
    ui.count = count;
  }

  function on_text_click(event) {
    const i = ui.pool.indexOf(event.target);
    if (i >= 0) { state.word = ui.first + i; draw(); }
  }
  function on_text_key(event) {
    const one = run(), from = one.wordOf[state.segment * one.length], end = ui.first + ui.count;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 }[event.key];
    if (step) {
      event.preventDefault();
      state.word = state.word < 0 ? from : Math.max(ui.first, Math.min(end - 1, state.word + step));
      draw();
    } else if (event.key === "PageUp" || event.key === "PageDown") {
      event.preventDefault();
      go(state.segment + (event.key === "PageUp" ? -1 : 1));
    }
  }

  function bars(list, rows, most) {
    while (list.children.length < rows.length) list.append(make("li", {}, make("span"), make("s"), make("em")));
    [...list.children].forEach((item, i) => {
      item.hidden = i >= rows.length;
      if (i >= rows.length) return;
      const [name, size, said] = rows[i];
      item.children[0].textContent = name;
      item.children[1].style.cssText = `--v:${Math.round((100 * size) / (most || 1))}%`;
      item.children[2].textContent = said ?? number(size);
    });
  }

  function colour_of(part) {
    if (part === "this segment" || part === "the attention") return "color-mix(in srgb, var(--muted) 55%, transparent)";
    if (/window|before|first words/.test(part)) return "color-mix(in srgb, var(--variant-4) 75%, transparent)";
    return "color-mix(in srgb, var(--negative) 85%, transparent)";
  }

  function draw_word(one) {
    const w = state.word >= 0 ? state.word : one.wordOf[Math.min(one.count, (state.segment + 1) * one.length) - 1];
    const t = Math.min(one.starts[w + 1], one.count) - 1, s = Math.floor(t / one.length);
    const rows = [make("h3", {}, `What “${trimmed(one.words[w])}” read`),
      make("p", { class: "note" }, (state.word < 0 ? "The last word of the segment; click or choose another. " : "") + "The shares of each layer's sources, in the order of the bar.")];
    for (const source of one.sources) {
      const width = source.parts.length;
      const share = source.parts.map((_, i) => value(source.share, t * width + i));
      rows.push(make("div", {}, make("div", { class: "note" }, `${source.name}: ` + source.parts.map((part, i) => `${part} ${number(share[i])}`).join(", "))));
      const stack = make("div", { class: "look-stack", "aria-hidden": "true" }, ...share.map((x, i) => {
        const bar = make("s");
        bar.style.cssText = `width:${(x || 0) * 100}%;background:${colour_of(source.parts[i])}`;
        return bar;
      }));
      rows.push(stack);
    }
    for (const memory of one.memories.filter((memory) => memory.readers)) {
      const read = memory.units.map((name, u) => [name, reading(memory, s, t - s * one.length, u)]);
      const list = make("ul", { class: "look-bars" });
      const best = read.sort((a, b) => b[1] - a[1]).slice(0, TOP).filter((row) => row[1] > 0);
      if (!best.length) continue;
      bars(list, best, best[0][1]);
      rows.push(make("p", { class: "note" }, `${memory.name}: how much it read of each ${UNIT[memory.kind] ?? "slot"}`), list);
    }
    const p = value(one.p, t);
    if (!Number.isNaN(p)) rows.push(make("p", {}, `Its probability was ${number(p)}` + one.emptied.map((other) => `, ${number(value(other.p, t))} with the ${other.kind} emptied before this segment`).join("") + "."));
    ui.word.replaceChildren(...rows);
  }

  // A picture of rows × columns, one pixel each, that the page enlarges.
  function picture(canvas, columns, rows, level, colour) {
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
    const [r, g, b] = rgb(colour);
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < columns; x++) {
        const at = 4 * (y * columns + x), v = level(x, y);
        image.data[at] = r; image.data[at + 1] = g; image.data[at + 2] = b;
        image.data[at + 3] = Number.isNaN(v) ? 0 : Math.round(255 * Math.max(0, Math.min(1, v)));
      }
    }
    context.putImageData(image, 0, 0);
  }
  function rgb(name) {
    const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    probe.fillStyle = value;
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const panel of [...(ui.memories ?? []), ui.trace].filter(Boolean)) panel.paint(); });

  const CURVES = {
    moved: "how far it moved", read: "how much it was read", keeps: "how much it kept itself", update: "update gate", reset: "reset gate",
    candidate: "distance of the candidate", strength: "strength of the direction",
  };

  const UNIT = { sums: "direction", tokens: "memory token" };

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
  function notch(heat, at, total, title) {
    const line = make("u", { title });
    line.style.left = `${(100 * at) / total}%`;
    heat.box.append(line);
  }
  const axis = (...parts) => make("div", { class: "look-axis" }, ...parts.map((part) => make("span", {}, part)));

  function build_panels(one) {
    const panel = (memory) => (memory.units.length ? unit_panel : memory.received ? window_panel : plain_panel);
    ui.memories = one.memories.map((memory, m) => panel(memory)(one, memory, m));
    ui.panels.replaceChildren(...ui.memories.map((panel) => panel.element));
  }

  // Of a memory whose part in the shares of sources is all that was recorded.
  function plain_panel(one, memory) {
    const element = make("section", { class: "look-memory", "aria-label": memory.name }, make("h3", {}, memory.name), make("p", { class: "note" }, memory.about));
    return { element, paint() {}, select() {}, update() {} };
  }

  function unit_panel(one, memory, m) {
    const count = memory.units.length, total = segments(one);
    const names = Object.keys(memory.curves);
    const kind = make("select", { "aria-label": `curve of ${memory.name}`, onchange: () => paint() }, ...names.map((name) => make("option", { value: name }, CURVES[name] ?? name)));
    kind.value = memory.curves.keeps ? "read" : names.includes("strength") ? "strength" : names[0];
    const heat = strip(`${memory.name}: a row for each of ${count} units, a column for each of ${total} segments`, (x, y) => {
      choose(m, Math.min(count - 1, Math.floor(y * count)));
      go(Math.floor(x * total));
    });
    heat.canvas.style.height = `${Math.max(3, Math.min(14, 320 / count)) * count}px`;
    if (one.told) notch(heat, one.told[0] / one.length, total, "told here");
    const units = make("select", { "aria-label": `unit of ${memory.name}`, onchange: () => choose(m, +units.value) }, make("option", { value: -1 }, "choose one"), ...memory.units.map((name, u) => make("option", { value: u }, name)));
    const said = make("p", { class: "note" }), heard = make("ul", { class: "look-bars written" }), none = make("p", {}, "None recorded."), ever = make("div", { class: "row" });
    const detail = make("div", { hidden: true }, said, make("p", { class: "note" }, "Words that it took most from in this segment's step:"), heard, none, make("p", { class: "note" }, "In the whole text, up to 12 words that it took most from, one a segment (a button goes there):"), ever);
    const scale = make("p", { class: "note" });
    const element = make("section", { class: "look-memory", "aria-label": memory.name }, make("h3", {}, memory.name), make("p", { class: "note" }, memory.about), make("div", { class: "row" }, make("label", {}, "shading shows ", kind), make("label", {}, "unit: ", units)), heat.box, axis("segment 1", one.told ? "dotted: told here" : "", `segment ${total}`), scale, detail);

    function paint() {
      const curve = memory.curves[kind.value];
      picture(heat.canvas, total, count, (x, y) => value(curve, x * count + y) / (curve.most || 1), kind.value === "read" ? "--negative" : "--positive");
      scale.textContent = `A row is a ${UNIT[memory.kind] ?? "slot"}, a column a segment; from no colour, 0, to full colour, ${number(curve.most, 3)}: ${CURVES[kind.value] ?? kind.value}.`;
    }
    function select() {
      const mine = state.memory === m && state.unit >= 0;
      units.value = mine ? state.unit : -1;
      detail.hidden = !mine;
      heat.row.hidden = !mine;
      if (!mine) return;
      heat.row.style.cssText = `top:${(100 * state.unit) / count}%;height:${100 / count}%`;
      ever.replaceChildren(...most_written(one, memory, state.unit).map(([t, weight]) =>
        make("button", { type: "button", title: `weight ${number(weight)}`, onclick: () => { go(Math.floor((t + memory.offset) / one.length)); state.word = one.wordOf[t]; draw(); } }, trimmed(one.words[one.wordOf[t]]))));
    }
    function update() {
      mark(heat, state.segment, total);
      if (detail.hidden) return;
      const s = state.segment, from = s * one.length - memory.offset;
      said.textContent = `${memory.units[state.unit]}, segment ${s + 1}: ` + names.map((name) => `${CURVES[name] ?? name} ${number(value(memory.curves[name], s * count + state.unit), 3)}`).join("; ");
      if (!memory.written) { heard.hidden = true; return; }
      slice(memory.written, s, state.unit, scratch);
      const rows = [];
      for (let i = 0; i < one.length && s * one.length + i < one.count; i++) if (scratch[i] > 0 && from + i >= 0) rows.push([trimmed(one.words[one.wordOf[from + i]]), scratch[i]]);
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
      for (let i = 0; i < one.length && s * one.length + i < one.count; i++) if (scratch[i] > (best < 0 ? 0 : scratch[best])) best = i;
      const t = s * one.length + best - memory.offset;
      if (best >= 0 && t >= 0) tokens.push([t, scratch[best]]);
    }
    return tokens.sort((a, b) => b[1] - a[1]).slice(0, 12).sort((a, b) => a[0] - b[0]);
  }

  function window_panel(one, memory, m) {
    const total = segments(one), width = memory.received.shape[1], reach = width - one.length;
    const own = open(memory.received).some((level, i) => level && i % width >= reach); // else it has earlier words alone
    const tall = own || !reach ? width : reach, rows = Math.min(64, tall);
    const heat = strip(`${memory.name}: attention by distance, a column for each of ${total} segments`, (x) => { choose(m, -1); go(Math.floor(x * total)); });
    heat.canvas.style.height = `${Math.max(64, rows * 2)}px`;
    const list = make("ul", { class: "look-bars" });
    const heading = make("p", { class: "note" }, "Earlier words that this segment attends to most:");
    const element = make("section", { class: "look-memory", "aria-label": memory.name }, make("h3", {}, memory.name), make("p", { class: "note" }, `${memory.about} A column is a segment; in it, the ${tall} tokens ${tall === width ? "up to its end" : "before it"}, the oldest on top; from no colour, 0, to full blue, ${number(memory.received.most, 3)}: attention to the token${tall > rows ? ", of the tokens of a row the greatest" : ""}.`), heat.box, axis("segment 1", `segment ${total}`), heading, list);
    function paint() {
      picture(heat.canvas, total, rows, (x, y) => {
        let most = 0;
        for (let i = Math.floor((y * tall) / rows); i < Math.max(Math.floor((y * tall) / rows) + 1, Math.floor(((y + 1) * tall) / rows)); i++) most = Math.max(most, value(memory.received, x * width + i));
        return most / (memory.received.most || 1);
      }, "--negative");
    }
    function update() {
      mark(heat, state.segment, total);
      const s = state.segment, from = s * one.length - reach, earlier = [];
      for (let i = 0; i < reach; i++) {
        const t = from + i, x = value(memory.received, s * width + i);
        if (t >= 0 && x > 0) earlier.push([trimmed(one.words[one.wordOf[t]]), x, number(x, 3)]);
      }
      earlier.sort((a, b) => b[1] - a[1]);
      heading.hidden = !earlier.length;
      bars(list, earlier.slice(0, TOP), earlier.length ? earlier[0][1] : 1);
    }
    return { element, paint, select() {}, update };
  }

  function build_prediction(one) {
    ui.trace = null;
    ui.effects = null;
    if (!one.predictions.length) { ui.prediction.replaceChildren(); return; }
    const places = make("select", { "aria-label": "word that is predicted", onchange: () => { state.prediction = +places.value; build_trace(one); draw(); } },
      ...one.predictions.map((prediction, i) => make("option", { value: i }, `“${trimmed(prediction.answer)}” after “${trimmed(one.words[one.wordOf[prediction.token - 1]])}” (segment ${Math.ceil(prediction.token / one.length)})`)));
    ui.about = make("p", {});
    ui.asked = make("p", {});
    ui.holder = make("div", {});
    ui.prediction.replaceChildren(make("h3", {}, "What a prediction needs"), make("label", { class: "row" }, "prediction of ", places), ui.about, ui.asked, ui.holder);
    build_trace(one);
  }

  function mean_of(values) {
    const known = values.filter((x) => x != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 1;
  }

  function build_trace(one) {
    const prediction = one.predictions[state.prediction];
    ui.about.textContent = `As read, “${trimmed(prediction.answer)}” has probability ${number(prediction.p, 3)}` + (prediction.guess === prediction.answer ? ", the most of all." : `; the likeliest is “${trimmed(prediction.guess)}” with ${number(prediction.certainty, 3)}.`);
    if (one.asked && !one.asked.known) { ui.holder.replaceChildren(make("p", { class: "note" }, "The answer is not known at the end, so nothing was emptied.")); ui.trace = ui.effects = null; return; }
    if (!prediction.boundaries.length) { ui.holder.replaceChildren(make("p", { class: "note" }, "No segment comes before it, so nothing was emptied.")); ui.trace = ui.effects = null; return; }
    const whole = prediction.effects.filter((effect) => effect.unit == null && !effect.alone);
    const units = prediction.effects.filter((effect) => effect.unit != null);
    const lone = units.some((effect) => effect.alone);
    if (!lone) state.alone = false;
    const choice = (name, alone) => {
      const input = make("input", { type: "radio", name: "look-alone", onchange: () => { state.alone = alone; build_trace(one); draw(); } });
      input.checked = state.alone === alone;
      return make("label", {}, input, name);
    };
    // The units that matter first: those without which the answer is lost, or those that keep it alone.
    const level = (effect) => Math.round(20 * mean_of(effect.p)) * (state.alone ? -1 : 1);
    const sorted = units.filter((effect) => effect.alone === state.alone).sort((a, b) => level(a) - level(b));
    const rows = [...(state.alone ? [] : whole), ...sorted];
    const columns = prediction.boundaries.length;
    const heat = strip(`probability of the answer with a part emptied: a row for each of ${rows.length} parts, a column for each of ${columns} segments before which it is emptied`, (x, y) => {
      const effect = rows[Math.min(rows.length - 1, Math.floor(y * rows.length))];
      if (effect.memory != null) choose(effect.memory, effect.unit ?? -1);
      go(prediction.boundaries[Math.min(columns - 1, Math.floor(x * columns))]);
    });
    heat.canvas.style.height = `${Math.max(4, Math.min(14, 360 / rows.length)) * rows.length}px`;
    const list = make("ul", { class: "look-bars" }), title = make("p", { class: "note" });
    ui.holder.replaceChildren(
      ...(lone ? [make("div", { class: "row", role: "radiogroup", "aria-label": "what is done to a unit" }, choice(" emptied", false), choice(" kept alone", true))] : []),
      make("p", { class: "note" }, one.explained),
      make("p", { class: "note" }, (state.alone ? "Each row is a unit, each column a segment before which the other units of its memory are emptied; other memories stay." : "Each row is a part, each column a segment before which it is emptied.") + " From no grey, as read, to full grey: the share of the answer's probability that goes. The rows stand in the order of the list below."),
      heat.box, axis(`segment ${prediction.boundaries[0] + 1}`, `segment ${prediction.boundaries[columns - 1] + 1}`), title, make("div", { class: "look-scroll", tabindex: "0", role: "region", "aria-label": "probability of the answer by part" }, list));
    const paint = () => picture(heat.canvas, columns, rows.length, (x, y) => {
      const p = rows[y].p[x];
      return p == null ? NaN : Math.max(0, 1 - p / (prediction.p || 1));
    }, "--ink");
    paint();
    ui.trace = { paint };
    ui.effects = () => {
      let at = prediction.boundaries.indexOf(state.segment);
      mark(heat, at, columns);
      if (at < 0) at = state.segment < prediction.boundaries[0] ? 0 : columns - 1;
      title.textContent = `Probability of “${trimmed(prediction.answer)}” if this is ${state.alone ? "kept alone" : "emptied"} before segment ${prediction.boundaries[at] + 1}:`;
      bars(list, rows.map((effect) => [effect.name, effect.p[at] ?? 0, number(effect.p[at])]), 1);
      rows.forEach((effect, i) => { const other = effect.unit == null && effect.name !== one.memories[effect.memory]?.name; // several memories, or a head
        list.children[i].className = !other && effect.memory === state.memory && (effect.unit ?? -1) === state.unit ? "chosen" : ""; });
    };
  }

  function draw() {
    const one = run(), s = state.segment, total = segments(one);
    ui.slider.value = s + 1;
    const from = s * one.length, to = Math.min(one.count, from + one.length);
    const text = `segment ${s + 1} of ${total}, tokens ${from + 1} to ${to}`;
    ui.output.textContent = text;
    ui.slider.setAttribute("aria-valuetext", text);
    draw_text(one);
    for (const panel of ui.memories) panel.update();
    draw_word(one);
    if (ui.effects) ui.effects();
    if (ui.asked && one.asked) {
      let known = -1;
      one.asked.after.forEach((after, i) => { if (after <= to) known = i; });
      ui.asked.textContent = known < 0 ? "Nothing has been told yet." : `Asked after token ${one.asked.after[known]}, the answer would have probability ${number(one.asked.p[known], 3)}.`;
    } else if (ui.asked) ui.asked.textContent = "";
  }

  // Pictures: the two branches of a layer, and where a slot answered.
  function images(all, place) {
    const now = { model: 0, image: 0, layer: 0, slot: -1 }; // slot −1: the one that answered most
    const select = (label, count, change) => make("select", { "aria-label": label, onchange: (event) => { change(+event.target.value); show(); } }, ...count);
    const option = (name, i) => make("option", { value: i }, name);
    const slider = make("input", { type: "range", min: 1, max: 1, value: 1, "aria-label": "image", oninput: () => { now.image = +slider.value - 1; show(); } });
    const said = make("output", {}), layers = select("layer", [], (i) => { now.layer = i; now.slot = -1; fill(); });
    const slots = select("slot", [], (i) => { now.slot = i; });
    const models = all.length > 1 ? [make("label", {}, "model ", select("model", all.map((one, i) => option(one.name, i)), (i) => { now.model = i; now.layer = 0; now.slot = -1; fill(); }))] : [];
    const names = ["the image", "o_self", "o_mem", "where the slot answered"];
    const panes = names.map((name) => ({ canvas: make("canvas", { role: "img", "aria-label": name }), caption: make("figcaption", {}, name) }));
    const list = make("ul", { class: "look-bars" }), alike = make("p", { class: "note" });
    place.replaceChildren(make("div", { class: "look" },
      make("div", { class: "look-bar", role: "group", "aria-label": "image, layer and slot" }, ...models, slider, said, make("label", {}, "layer ", layers), make("label", {}, "slot ", slots)),
      make("div", { class: "look-images" }, ...panes.map((pane) => make("figure", {}, pane.canvas, pane.caption))),
      make("p", { class: "note" }, "o_self and o_mem: means over heads and channels, each scaled to its own range."), alike, list));
    function fill() {
      const one = all[now.model];
      slider.max = one.labels.length;
      now.image = Math.min(now.image, one.labels.length - 1);
      layers.replaceChildren(...one.layers.map((layer, i) => option(`${layer.name}, share by size ${number(layer.share)}`, i)));
      layers.value = now.layer;
      slots.replaceChildren(option("that answered most", -1), ...one.layers[now.layer].slots.map((slot, i) => option(`slot ${slot}`, i)));
    }
    function map(canvas, array, first, h, w, most, colour) {
      picture(canvas, w, h, (x, y) => value(array, first + y * w + x) / most, colour);
    }
    function show() {
      const one = all[now.model], i = now.image, layer = one.layers[now.layer];
      slots.value = now.slot;
      const text = `image ${i + 1} of ${one.labels.length}: ${one.labels[i]}` + (one.guesses.length ? `, classified as ${one.guesses[i]}` : "");
      said.textContent = text;
      slider.value = i + 1;
      slider.setAttribute("aria-valuetext", text);
      const [, height, width, channels] = one.pixels.shape, pixels = open(one.pixels), canvas = panes[0].canvas;
      canvas.width = width;
      canvas.height = height;
      const context = canvas.getContext("2d"), image = context.createImageData(width, height);
      for (let p = 0; p < width * height; p++) {
        for (let c = 0; c < 3; c++) image.data[4 * p + c] = pixels[(i * width * height + p) * channels + (channels === 3 ? c : 0)];
        image.data[4 * p + 3] = 255;
      }
      context.putImageData(image, 0, 0);
      const [, h, w] = layer.own.shape, count = layer.slots.length;
      map(panes[1].canvas, layer.own, i * h * w, h, w, 1, "--positive");
      map(panes[2].canvas, layer.memory, i * h * w, h, w, 1, "--negative");
      const read = layer.slots.map((slot, k) => {
        let sum = 0;
        for (let p = 0; p < h * w; p++) sum += value(layer.answered, (i * count + k) * h * w + p);
        return [`slot ${slot}`, sum / (h * w), k];
      }).sort((a, b) => b[1] - a[1]);
      const slot = now.slot < 0 ? read[0][2] : now.slot;
      map(panes[3].canvas, layer.answered, (i * count + slot) * h * w, h, w, layer.answered.most || 1, "--negative");
      panes[3].caption.textContent = `where slot ${layer.slots[slot]} answered`;
      alike.textContent = `Slots by their mean weight in this image${count < layer.count ? `, of the ${count} that answered most over all images` : ""}; if all ${layer.count} were read alike, each would have ${number(1 / layer.count, 3)}:`;
      bars(list, read.slice(0, TOP).map(([name, x]) => [name, x, number(x, 3)]), read[0][1]);
      [...list.children].forEach((item, k) => { item.className = read[k]?.[2] === slot ? "chosen" : ""; });
    }
    fill();
    show();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  }

  const shots = [...document.querySelectorAll("script.look-pictures")].map((one) => JSON.parse(one.textContent));
  if (shots.length) images(shots, document.getElementById("look-images"));
  if (!runs.length) return;
  // The first model with a memory that an answer was found in, and the segment of the word that is asked.
  state.run = Math.max(0, runs.findIndex((one) => one.memories.some((memory) => memory.units.length) && (!one.asked || one.asked.known)));
  if (run().asked) state.segment = segments(run()) - 1;
  build();
  open_run(state.run);
  if (run().asked) { state.word = run().words.length - 1; draw(); }
  window.mnemosLook = { go, choose, state, open_run, number, count: () => segments(run()) };
})();
