"use strict";
// Draws the charts of a page again, with values and switches, and makes its tables sortable. See charts.py.
(() => {
  const chosen = new Map(); // by figure: its switches, which outlive a new version of a page that is watched
  let figures = []; // of the page that is shown
  const MOST_VALUES = 8;
  const ROW = 26; // pixels of an arm in a strip

  const number = (value) =>
    value === null || value === undefined
      ? "–"
      : Math.abs(value) >= 1e15 || (value !== 0 && Math.abs(value) < 1e-4)
        ? value.toPrecision(3)
        : value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 15 : 4, maximumFractionDigits: 4 });

  const filled = (spec, words) =>
    Array.isArray(spec)
      ? spec.map((one) => filled(one, words))
      : spec && typeof spec === "object"
        ? Object.fromEntries(Object.entries(spec).map(([key, value]) => [key, filled(value, words)]).filter(([, value]) => value !== undefined))
        : typeof spec === "string" && spec in words
          ? words[spec]
          : spec;

  class Chart {
    constructor(element, figure) {
      this.element = element;
      this.figure = figure;
      Object.assign(this, JSON.parse(element.querySelector(".chart-data").textContent));
      const names = Object.keys(this.columns);
      this.points = this.columns.s.map((_, i) => {
        const point = Object.fromEntries(names.map((name) => [name, this.columns[name][i]]));
        if (this.kind === "strip") point.name = this.series[point.s].name;
        return point;
      });
      this.picture = document.createElement("div");
      this.picture.className = "picture";
      this.overlay = document.createElement("div");
      this.overlay.className = "overlay";
      this.overlay.setAttribute("aria-hidden", "true");
      this.readout = document.createElement("p");
      this.readout.className = "readout";
      this.readout.setAttribute("role", "status");
      this.still = element.querySelector("svg");
      this.still.replaceWith(this.picture);
      this.picture.append(this.still);
      element.append(this.overlay);
      element.after(this.readout);
      element.tabIndex = 0;
      element.setAttribute("aria-label", `${element.getAttribute("aria-label")}. Arrow keys read the values.`);
      element.addEventListener("keydown", (event) => this.key(event));
      element.addEventListener("pointermove", (event) => this.point(event));
      element.addEventListener("pointerleave", () => this.leave());
      element.addEventListener("blur", () => this.leave());
      element.addEventListener("focus", () => this.view && this.move(0));
      this.hint();
    }

    hint() {
      this.readout.textContent = "";
      const hint = document.createElement("span");
      hint.className = "hint";
      hint.textContent = "point at the chart, or focus it and use the arrow keys";
      this.readout.append(hint);
    }

    axis() {
      const place = this.axes.findIndex((axis) => axis.name === this.figure.state.axis);
      return place < 0 ? 0 : place;
    }

    visible() {
      const { arms, seeds, logX, logY } = this.figure.state;
      const x = `x${this.axis()}`;
      return this.points.filter(
        (point) =>
          !arms.has(this.series[point.s].name) &&
          !(seeds.has(this.runs[point.r]) && this.runs.length > 1) &&
          point[x] !== null &&
          (!logX || point[x] > 0) &&
          (!logY || point.y === null || point.y > 0),
      );
    }

    async draw() {
      const { logX, logY } = this.figure.state;
      const place = this.axis();
      const axis = this.axes[place];
      this.x = `x${place}`;
      this.seen = this.visible();
      const words = { "@x": this.x, "@title": axis.name, "@form": axis.form };
      words["@scale"] = logX ? "log" : "linear";
      words["@yscale"] = logY ? "log" : "linear";
      words["@zero"] = logX ? undefined : false;
      words["@yzero"] = logY ? undefined : false;
      const spec = filled(this.spec, words);
      for (const layer of spec.layer) {
        const { x, y } = layer.encoding;
        if (logY && y && y.scale) delete y.scale.domain;
        if (x && x.axis && x.axis.values && place > 0) delete x.axis.values;
        if (logX && x && x.scale && x.axis && x.axis.values) x.scale.base = 2;
      }
      if (logY) spec.layer = spec.layer.filter((layer) => !(layer.encoding.y && layer.encoding.y.datum <= 0));
      if (logX) spec.layer = spec.layer.filter((layer) => !(layer.encoding.x && layer.encoding.x.datum <= 0));
      const drawing = (this.drawing = (this.drawing || 0) + 1);
      spec.data = { values: this.seen.map((point) => ({ ...point })) };
      if (this.kind === "strip") spec.height = ROW * Math.max(1, new Set(this.seen.map((point) => point.s)).size);
      spec.width = Math.max(160, this.element.clientWidth);
      spec.autosize = { type: "fit-x", contains: "padding" };
      const holder = document.createElement("div");
      const { view, finalize } = await vegaEmbed(holder, spec, { renderer: "svg", actions: false, ast: true, tooltip: false, logLevel: 1 });
      if (drawing !== this.drawing) return finalize();
      if (this.finalize) this.finalize();
      this.picture.replaceChildren(holder);
      Object.assign(this, { view, finalize, width: this.element.clientWidth });
      const groups = new Map();
      for (const point of this.seen) {
        const key = `${point.s} ${point.r}`;
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push(point);
      }
      for (const group of groups.values()) group.sort((a, b) => a[this.x] - b[this.x]);
      this.groups = [...groups.values()];
      this.places =
        this.kind === "strip"
          ? [...new Set(this.seen.map((point) => point.s))].sort((a, b) => a - b)
          : [...new Set(this.seen.map((point) => point[this.x]))].sort((a, b) => a - b);
      this.at = Math.min(this.at ?? 0, Math.max(0, this.places.length - 1));
      this.element.dataset.drawn = drawing;
      if (document.activeElement === this.element) this.show();
      else this.leave();
    }

    // Ends what was drawn, and a drawing that is being made.
    end() {
      this.drawing = NaN;
      this.finalize?.();
    }

    // [{name, colour, mean, least, most, x}] of the arms at a place.
    values(place) {
      const found = new Map();
      for (const group of this.groups) {
        let near = group[0];
        if (this.kind === "strip") {
          if (near.s !== place) continue;
        } else {
          for (const point of group) if (Math.abs(point[this.x] - place) < Math.abs(near[this.x] - place)) near = point;
          if (this.kind === "marks" && near[this.x] !== place) continue;
          if (place < group[0][this.x] || place > group[group.length - 1][this.x]) continue;
        }
        if (!found.has(near.s)) found.set(near.s, []);
        found.get(near.s).push(...(this.kind === "strip" ? group : [near]));
      }
      const key = this.kind === "strip" ? "x0" : "y";
      return [...found].map(([series, points]) => {
        const known = points.filter((point) => point[key] !== null);
        const values = known.map((point) => point[key]);
        const ends = points.length === 1 && "low" in points[0] ? [points[0].low, points[0].high] : values;
        return {
          name: this.series[series].name,
          colour: this.series[series].colour,
          x: points[0][this.x],
          mean: values.length ? values.reduce((a, b) => a + b, 0) / values.length : null,
          least: Math.min(...ends),
          most: Math.max(...ends),
          count: values.length,
          each: known.map((point) => `${this.runs[point.r]}: ${number(point[key])}`),
        };
      });
    }

    show(near = null) {
      if (!this.view || !this.places.length) return this.hint();
      const place = this.places[this.at];
      let found = this.values(place);
      if (this.kind !== "strip") found.sort((a, b) => b.mean - a.mean);
      this.readout.textContent = "";
      if (this.kind !== "strip") this.say(`${this.axes[this.axis()].name} ${number(place)}`);
      this.mark(place, found);
      const all = found.length;
      if (all > MOST_VALUES) {
        let middle = this.arm ?? 0;
        if (near !== null) middle = found.reduce((best, one, i) => (Math.abs(one.mean - near) < Math.abs(found[best].mean - near) ? i : best), 0);
        this.arm = Math.max(0, Math.min(all - 1, middle));
        const first = Math.max(0, Math.min(all - MOST_VALUES, this.arm - MOST_VALUES / 2));
        found = found.slice(first, first + MOST_VALUES);
      }
      for (const one of found) {
        let text = `${one.name} ${number(one.mean)}`;
        if (this.kind === "strip" && one.count > 1) text = `${one.name}: mean ${number(one.mean)}; ${one.each.join("; ")}`;
        else if (one.most > one.least) text += ` (${number(one.least)} to ${number(one.most)})`;
        this.say(text, one.colour);
      }
      if (all > found.length) this.say(`${all - found.length} more: up and down`);
    }

    say(text, colour) {
      const part = document.createElement("span");
      if (colour) {
        const dot = document.createElement("i");
        dot.className = "dot";
        dot.style.color = colour;
        part.append(dot);
      }
      part.append(text);
      this.readout.append(part, " ");
    }

    // The upper left of the plot in the element.
    corner() {
      const [left, top] = this.view.origin();
      const padding = this.view.padding();
      return [left + padding.left, top + padding.top];
    }

    mark(place, found) {
      this.overlay.replaceChildren();
      const [left, top] = this.corner();
      const rule = document.createElement("div");
      const x = this.view.scale("x");
      const y = this.view.scale("y");
      const band = this.kind === "strip";
      rule.className = band ? "rule across" : "rule";
      if (band) Object.assign(rule.style, { left: `${left}px`, width: `${this.view.width()}px`, top: `${top + y(this.series[place].name) + y.bandwidth() / 2}px` });
      else Object.assign(rule.style, { left: `${left + x(place)}px`, top: `${top}px`, height: `${this.view.height()}px` });
      this.overlay.append(rule);
      if (band) return;
      for (const one of found) {
        if (one.mean === null) continue;
        const dot = document.createElement("i");
        Object.assign(dot.style, { left: `${left + x(one.x)}px`, top: `${top + y(one.mean)}px`, color: one.colour });
        this.overlay.append(dot);
      }
    }

    leave() {
      if (document.activeElement === this.element) return;
      this.overlay.replaceChildren();
      this.hint();
    }

    point(event) {
      if (!this.view || !this.places.length) return;
      const box = this.element.getBoundingClientRect();
      const [left, top] = this.corner();
      const x = event.clientX - box.left - left;
      const y = event.clientY - box.top - top;
      if (this.kind === "strip") {
        const scale = this.view.scale("y");
        const distance = (series) => Math.abs(scale(this.series[series].name) + scale.bandwidth() / 2 - y);
        this.at = this.places.reduce((best, one, i) => (distance(one) < distance(this.places[best]) ? i : best), 0);
        return this.show();
      }
      const scale = this.view.scale("x");
      this.at = this.places.reduce((best, one, i) => (Math.abs(scale(one) - x) < Math.abs(scale(this.places[best]) - x) ? i : best), 0);
      this.show(this.view.scale("y").invert(y));
    }

    key(event) {
      const far = Math.max(1, Math.round(this.places ? this.places.length / 10 : 1));
      const along = this.kind === "strip" ? { ArrowUp: -1, ArrowDown: 1 } : {};
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -Infinity, End: Infinity, ...along };
      if (event.key in steps) this.move(steps[event.key]);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        this.arm = (this.arm ?? 0) + (event.key === "ArrowDown" ? 1 : -1);
        this.show();
      } else if (event.key === "Escape") this.element.blur();
      else return;
      event.preventDefault();
    }

    move(by) {
      if (!this.view) return;
      this.at = Math.max(0, Math.min(this.places.length - 1, (this.at ?? 0) + by));
      this.show();
    }
  }

  class Figure {
    constructor(element) {
      this.element = element;
      const fresh = { arms: new Set(), seeds: new Set(), axis: null, logX: this.box("log-x")?.checked, logY: false };
      const name = element.dataset.figure;
      this.state = chosen.get(name) ?? fresh;
      chosen.set(name, this.state);
      this.charts = [...element.querySelectorAll(".chart")].map((one) => new Chart(one, this));
      for (const hidden of element.querySelectorAll(".switch[hidden], input[hidden]")) hidden.hidden = false;
      element.classList.add("live");
      const boxes = (kind) => [...element.querySelectorAll(`input.${kind}`)];
      for (const [kind, off] of [["arm", this.state.arms], ["seed", this.state.seeds]])
        for (const box of boxes(kind)) {
          box.checked = !off.has(box.value);
          box.addEventListener("change", () => {
            if (box.checked) off.delete(box.value);
            else off.add(box.value);
            this.draw();
          });
        }
      for (const [kind, key] of [["log-x", "logX"], ["log-y", "logY"]]) {
        const box = this.box(kind);
        if (!box) continue;
        box.checked = this.state[key];
        box.addEventListener("change", () => ((this.state[key] = box.checked), this.draw()));
      }
      const axis = this.box("axis");
      if (axis) {
        if (this.state.axis) axis.value = this.state.axis;
        axis.addEventListener("change", () => ((this.state.axis = axis.value), this.draw()));
      }
      for (const [kind, on] of [["all", true], ["none", false]])
        this.box(kind)?.addEventListener("click", () => {
          for (const box of boxes("arm")) {
            box.checked = on;
            if (on) this.state.arms.delete(box.value);
            else this.state.arms.add(box.value);
          }
          this.draw();
        });
      this.box("csv").addEventListener("click", () => this.download());
      const seen = new IntersectionObserver((entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        seen.disconnect();
        this.drawn = true;
        this.draw();
      }, { rootMargin: "200px" });
      let waiting;
      const resized = new ResizeObserver(() => {
        clearTimeout(waiting);
        waiting = setTimeout(() => {
          if (this.drawn && this.charts.some((chart) => chart.view && chart.width !== chart.element.clientWidth && chart.element.clientWidth)) this.draw();
        }, 150);
      });
      this.observers = [seen, resized];
      for (const one of this.observers) one.observe(element);
    }

    end() {
      for (const one of this.observers) one.disconnect();
      this.drawn = false;
      for (const chart of this.charts) chart.end();
    }

    box(kind) {
      return this.element.querySelector(`.${kind}`);
    }

    draw() {
      return Promise.all(this.charts.map((chart) => chart.draw()));
    }

    // Every point of the figure's charts. A text that a spreadsheet would run as a formula begins with an apostrophe.
    table() {
      const cell = (value) => {
        if (value === null || value === undefined) return "";
        const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
        return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
      };
      const axes = [...new Set(this.charts.flatMap((chart) => chart.axes.map((axis) => axis.name)))];
      const values = this.charts.every((chart) => chart.kind === "strip") ? [] : ["y", "low", "high"]; // a strip has x alone
      const lines = [["chart", "arm", "run", ...axes, ...values.map((name) => (name === "y" ? "value" : name))]];
      for (const chart of this.charts)
        for (const point of chart.points) {
          const x = axes.map((name) => point[`x${chart.axes.findIndex((axis) => axis.name === name)}`]);
          lines.push([chart.title || chart.slug, chart.series[point.s].name, chart.runs[point.r], ...x, ...values.map((name) => point[name])]);
        }
      return lines.map((line) => line.map(cell).join(",")).join("\r\n");
    }

    download() {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([this.table()], { type: "text/csv" }));
      link.download = `${this.element.dataset.figure}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }
  }

  const UNITS = { K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, s: 1, min: 60, h: 3600 };

  // The number at the beginning of a cell, such as 1.2 MiB or 2 min 03 s; NaN without one.
  function quantity(text) {
    const parts = text.replaceAll("−", "-").replaceAll(",", "").trim();
    const first = /^([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([A-Za-z]*)/.exec(parts);
    if (!first) return NaN;
    let value = Number(first[1]) * (UNITS[first[2]] ?? 1);
    for (const [, more, unit] of parts.slice(first[0].length).matchAll(/^\s+(\d+) (min|s)/g)) value += Number(more) * UNITS[unit];
    return value;
  }

  function sortable(table) {
    const body = table.tBodies[0];
    if (!table.tHead || body.rows.length < 2 || table.matches(".examples, .alignment, .texts")) return;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        const text = (row) => row.cells[column].textContent;
        const key = new Map([...body.rows].map((row) => [row, quantity(text(row))]));
        const numbers = [...key.values()].some((value) => !Number.isNaN(value)) && column > 0;
        const order = (a, b) => (numbers ? key.get(a) - key.get(b) : text(a).localeCompare(text(b), "en", { numeric: true }));
        const known = [...body.rows].filter((row) => !numbers || !Number.isNaN(key.get(row)));
        const rest = [...body.rows].filter((row) => !known.includes(row));
        known.sort((a, b) => (down ? order(a, b) : order(b, a)));
        body.append(...known, ...rest);
      });
    });
  }

  function begin(root) {
    figures.push(...[...root.querySelectorAll("figure.charts")].map((one) => new Figure(one)));
    for (const table of root.querySelectorAll("table")) sortable(table);
    const fold = root.querySelector(".fold");
    if (fold) {
      fold.hidden = false;
      fold.addEventListener("click", () => {
        const open = [...root.querySelectorAll("details.section")].some((one) => !one.open);
        for (const one of root.querySelectorAll("details.section")) one.open = open;
        fold.textContent = open ? "close all sections" : "open all sections";
      });
    }
  }

  // The sections that are closed would not be printed.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.section:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });

  // Ends the charts of a page before another takes its place.
  function end() {
    for (const figure of figures) figure.end();
    figures = [];
  }

  window.mnemosPage = { begin, end };
  begin(document);
})();
